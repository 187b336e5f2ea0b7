"""Examines the folder of a finished or running run for common faults, for ``agentrl doctor``.

Guarantees: files are only read; a half-written last line is skipped; a check that cannot be made is reported as such.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.config.supervised import SUPERVISED
from agentrl.core.episode import FAILURES
from agentrl.core.packed_episodes import earlier_parts, part_lines
from agentrl.observe.diagnosis import diagnose, is_step
from agentrl.observe.examine_evaluation import examine_evaluation, is_evaluation
from agentrl.observe.finding import Finding
from agentrl.observe.starved_server import failures_of, starved

METRICS, EPISODES, EVAL_EPISODES, CONFIG = "metrics.jsonl", "episodes.jsonl", "eval-episodes.jsonl", "config.json"
FAILED_EPISODES = "failed-episodes.jsonl"


def examine(run_dir: Path) -> tuple[list[Finding], list[str]]:
    """Returns the findings, and one sentence for each check that could not be made.

    Raises:
        UserError: ``run_dir`` is not the folder of a run.
    """
    if not (run_dir / METRICS).is_file() and is_evaluation(run_dir):
        return examine_evaluation(run_dir)
    if not (run_dir / METRICS).is_file():
        raise UserError(f"{run_dir} is no run: it has no {METRICS}")
    records = list(lines(run_dir / METRICS))
    config = json.loads((run_dir / CONFIG).read_text()) if (run_dir / CONFIG).is_file() else {}
    trainer = config.get("trainer") or {}
    numbers = [{k: float(v) for k, v in record.items() if isinstance(v, int | float)} for record in records]
    pause_mode = (config.get("weights") or {}).get("pause_mode", "retract")
    found = [
        replace(finding, cause=why) if finding.kind == "invalid" and (why := invalid_reason(run_dir)) else finding
        for finding in diagnose(numbers, trainer.get("dtype", "float32"), pause_mode)
    ]
    found = [
        replace(finding, remedy=why) if finding.kind == "failed" and (why := failed_kinds(run_dir)) else finding
        for finding in found
    ]
    if (hungry := starved(failures_of(run_dir, lines), config)) is not None:
        found.append(hungry)
    kind = trainer.get("type")
    nothing = f"trainer.type={kind} learns from examples: the rules are for episodes" if kind in SUPERVISED else ""
    unjudged = [] if any(map(is_step, records)) else [nothing or f"{METRICS} has no training step yet"]
    overlap, reason = overlapping_tasks(run_dir)
    if reason:
        unjudged.append(reason)
    if overlap:
        found.append(
            Finding(
                "overlap",
                f"{len(overlap)} tasks are both trained on and evaluated, e.g. {overlap[0]!r:.100}",
                "The evaluation does not measure generalisation.",
                "Use another split for valid_dataset, or remove the tasks from training.",
            )
        )
    return found, unjudged


def invalid_reason(run_dir: Path) -> str:
    """Returns the most frequent reason of invalid episodes in the newest evaluation; empty without a record of them."""
    if not (run_dir / EVAL_EPISODES).is_file():
        return ""
    reasons: dict[int, Counter[str]] = defaultdict(Counter)
    for episode in lines(run_dir / EVAL_EPISODES):
        of_step = reasons[episode.get("eval_step", 0)]
        if episode.get("reward") is None or episode.get("stop_reason") in FAILURES or episode.get("error"):
            said = str(episode.get("error") or "no reward").strip().splitlines() or ["no reward"]
            of_step[f"{episode.get('stop_reason')}: {said[-1]:.200}"] += 1
    newest = reasons[max(reasons)].most_common(1) if reasons else []
    return f"The most frequent reason is {newest[0][0]} ({newest[0][1]} times)." if newest else ""


def failed_kinds(run_dir: Path) -> str:
    """Returns the most frequent kinds of failed attempts of a run as a sentence; empty without a record of them."""
    file = run_dir / FAILED_EPISODES
    if not file.is_file():
        return ""
    kinds = Counter(str(line.get("kind")) for line in lines(file)).most_common(3)
    said = "; ".join(f"{kind:.200} ({count} times)" for kind, count in kinds)
    return f"See {FAILED_EPISODES}, which has the first traceback of each kind. The most frequent of the run: {said}."


def overlapping_tasks(run_dir: Path) -> tuple[list[str], str]:
    """Returns the prompts that were both trained on and evaluated, and why the check is impossible if it is."""
    for name in (EPISODES, EVAL_EPISODES):
        if not (run_dir / name).is_file():
            return [], f"overlap of training and evaluation: there is no {name} (logging.episodes, eval)"
    trained = {prompt for episode in lines(run_dir / EPISODES) if (prompt := first_prompt(episode))}
    evaluated = {prompt for episode in lines(run_dir / EVAL_EPISODES) if (prompt := first_prompt(episode))}
    return sorted(trained & evaluated), ""


def first_prompt(episode: dict[str, Any]) -> str:
    """Joins the messages before the first answer into one text."""
    for trajectory in (episode.get("trajectories") or {}).values():
        parts = []
        for node in trajectory.get("nodes", ()):
            if any(node.get("loss_mask", ())):
                break
            parts.append(str(node["message"].get("content")))
        return "\n".join(parts)
    return ""


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file and of its earlier parts; a line that is not complete JSON is skipped."""
    earlier = (line for part in earlier_parts(file) for line in part_lines(part))
    with file.open("rb") as opened:
        for line in itertools.chain(earlier, opened):
            try:
                value = json.loads(line)
            except ValueError:  # no JSON, or bytes that are no text
                continue
            if isinstance(value, dict):
                yield value
