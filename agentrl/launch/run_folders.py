"""Reads what the folders of runs say about them, for ``agentrl runs``.

Guarantees: folders are only read, while their runs go on too; what a file does not say is absent, and a folder of an
older or broken run is listed with what it has.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run, validate
from agentrl.config.overrides import parse_override, set_key
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED
from agentrl.evaluate.judged import ASKED, RESULT, SETUP
from agentrl.evaluate.stored import result_numbers
from agentrl.launch.resume import missing_outputs
from agentrl.launch.run_owner import read_owner
from agentrl.observe.sinks import METRICS_FILE, read_metrics
from agentrl.rollout.journal_lines import FILE as JOURNAL
from agentrl.rollout.journal_proof import Proof, Violation, prove
from agentrl.train.checkpoint_state import latest_checkpoint, read_state, why_over

CONFIG = "config.json"
CONTROLLER = Path("processes") / "controller.json"
DAMAGED = "its config.json is damaged"
State = Literal["starting", "running", "finished", "stopped", "failed", "killed", "unknown"]
SHOWN = ("eval/accuracy", "eval/reward", "reward/mean_drawn", "eval/loss", "train/loss")  # the first that is there


@dataclass(frozen=True)
class RunInfo:
    """Summary of a run, read from its folder.

    Attributes:
        name: Name of the run.
        folder: Folder of the run.
        kind: Trainer and environment.
        state: Whether it goes on, or how it ended.
        step: Steps recorded; ``None`` without any.
        total: Steps that it makes at most; ``None`` for an evaluation.
        checkpoint: Step of the latest checkpoint; ``None`` without one.
        metric: Name of the metric shown.
        value: Latest value of the metric.
        age: Seconds since the folder's run last wrote something.
        reason: Why it ended, where it did not succeed.
        owner: Record of its latest launcher; empty without one.
    """

    name: str
    folder: Path
    kind: str
    state: State
    step: int | None
    total: int | None
    checkpoint: int | None
    metric: str | None
    value: float | None
    age: float
    reason: str
    owner: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return {**vars(self), "folder": str(self.folder)}


def find_run(name: str, runs: Path) -> Path:
    """Returns the folder of a run, given by name or by path.

    Raises:
        UserError: There is no such run.
    """
    for folder in (Path(name), runs / name):
        if (folder / CONFIG).is_file():
            return folder
    raise UserError(f"no run {name!r} in {runs}, and no folder {name} with a {CONFIG}; agentrl runs list shows all")


def all_runs(runs: Path) -> list[RunInfo]:
    """Reads all runs of a folder and the several evaluations of one call in it, the one that wrote last first."""
    several = [file.parent for file in runs.glob(f"*/{ASKED}") if not (file.parent / CONFIG).is_file()]
    files = [*runs.glob(f"*/{CONFIG}"), *(file for folder in several for file in folder.glob(f"*/{CONFIG}"))]
    found = [run_info(file.parent) for file in files]
    return sorted(found, key=lambda run: run.age)


def run_info(folder: Path) -> RunInfo:
    """Reads a run's folder."""
    config = _settings(folder)
    trainer, owner = config.get("trainer") or {}, read_owner(folder)
    latest = last_metrics(folder)
    step = latest.get("step")
    metric = next((name for name in SHOWN if name in latest), None)
    files = [folder / name for name in (CONFIG, METRICS_FILE, JOURNAL, "eval-episodes.jsonl")]
    wrote = max(file.stat().st_mtime for file in files if file.is_file())
    checkpoint = latest_checkpoint(folder / "checkpoints")
    return RunInfo(
        folder.name,
        folder,
        f"{trainer.get('type') or 'evaluation'}, {(config.get('env') or {}).get('id')}" if config else DAMAGED,
        _state(folder, owner, examples=trainer.get("type") in SUPERVISED),
        None if step is None else int(step),
        trainer.get("total_steps") if trainer.get("type") else None,
        None if checkpoint is None else read_state(checkpoint)["step"],
        metric,
        None if metric is None else latest[metric],
        max(0.0, time.time() - wrote),
        owner.get("reason", ""),
        owner,
    )


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of a run; empty if their file is damaged: the disk was full when it was written, say."""
    try:
        found = json.loads((folder / CONFIG).read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _whole_settings(folder: Path) -> dict[str, Any]:
    found = _settings(folder)
    if not found:
        raise UserError(f"{folder}: {DAMAGED}")
    return found


def _state(folder: Path, owner: dict[str, Any], *, examples: bool) -> State:
    if owner.get("living"):
        alone = examples or (folder / SETUP).is_file()  # no controller: it learns from examples, or evaluates
        return "running" if alone or (folder / CONTROLLER).is_file() else "starting"
    if not owner:
        return "unknown"
    if "ended" not in owner:
        return "killed"
    return {0: "finished", 130: "stopped"}.get(owner["code"], "failed")  # type: ignore[return-value]


def how_to_go_on(run: RunInfo) -> str:
    """Says what a resume of a run that has ended would do; empty for a run that goes on."""
    if run.state in ("running", "starting"):
        return ""
    recipe = recipe_of_run(run.folder)
    if recipe.trainer.type is None:
        return "" if run.state == "finished" else "a resume keeps what was judged and asks the rest"
    checkpoint = latest_checkpoint(run.folder / "checkpoints")
    if checkpoint is None:
        return "it has no checkpoint: start it anew"
    state = read_state(checkpoint)
    over, missing = why_over(recipe, state), missing_outputs(recipe, run.folder, state)
    if over is None:
        return f"a resume goes on after step {state['step']}"
    return f"a resume only writes what is missing: {', '.join(missing)}" if missing else f"it {over}"


def check_journal(run: RunInfo) -> Proof:
    """Proves from a run's journal that each draw was trained once.

    Raises:
        Violation: It was not; also if a draw of a finished run has no end, or the journal ends before a checkpoint.
        JournalError: The journal is damaged.
        UserError: The run has no journal.
    """
    if not (run.folder / JOURNAL).is_file():
        raise UserError(f"run {run.name!r} has no {JOURNAL}: no group of it was admitted")
    proof = prove(run.folder)
    if run.checkpoint is not None and (proof.checkpoint is None or proof.checkpoint < run.checkpoint):
        raise Violation(
            f"the journal ends after {proof.steps} trained steps, and there is a checkpoint after step "
            f"{run.checkpoint}: its last lines are lost"
        )
    if run.state == "finished" and proof.running:
        line, _ = proof.admitted[proof.running[0]]
        raise Violation(f"draw {proof.running[0]}, admitted in line {line}, never ended, and the run is finished")
    return proof


def recipe_to_resume(folder: Path, overrides: list[str]) -> Recipe:
    """Returns the recipe with which a run goes on: its own, with some settings changed.

    Raises:
        UserError: The settings are damaged, or cannot be used.
    """
    data = _whole_settings(folder)
    for key, value in map(parse_override, overrides):
        data = set_key(data, key, value)
    data = set_key(data, "name", folder.name)
    return validate(set_key(data, "launch.run_dir", str(folder.parent)))


def live_status(folder: Path) -> dict[str, Any]:
    """Asks the controller of a running run what each process waits for; empty for a run that has no controller.

    Raises:
        UserError: The controller does not answer.
    """
    import httpx

    if not (folder / CONTROLLER).is_file():
        return {}
    access = json.loads((folder / CONTROLLER).read_text())
    headers = {"Authorization": f"Bearer {access['secret']}"}
    try:
        response = httpx.get(f"{access['url']}/status", headers=headers, timeout=10.0, trust_env=False)
    except httpx.HTTPError as error:
        raise UserError(f"the run's controller at {access['url']} does not answer: {error}") from error
    if response.status_code != 200:
        raise UserError(f"the run's controller at {access['url']} answered {response.status_code}: {response.text}")
    return response.json()


def settings_that_differ(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """Returns the settings in which two runs differ, by their dotted keys; ``None`` where a run has none.

    Raises:
        UserError: The settings of one are damaged.
    """
    one, other = (_flat(_whole_settings(folder)) for folder in (first, second))
    keys = dict.fromkeys([*one, *other])
    found = {key: (one.get(key), other.get(key)) for key in keys if key not in ("name", "launch.run_dir")}
    return {key: values for key, values in found.items() if values[0] != values[1]}


def last_metrics(folder: Path) -> dict[str, float]:
    """Returns the latest value of each metric that a run recorded, without times of day; those of an evaluation too."""
    path, result = folder / METRICS_FILE, folder / RESULT
    records = read_metrics(path) if path.is_file() else []
    if not records and result.is_file():
        return {name: value for name, value in result_numbers(result).items() if name.startswith("eval/")}
    return {name: value for record in records for name, value in record.items() if name != "time"}


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
