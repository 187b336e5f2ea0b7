"""``agentrl runs``: what the folders of runs say, the proof, and the differences of two runs."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.runs import short_time
from agentrl.config.load import load_recipe
from agentrl.launch import api, run_folders
from agentrl.launch.results import ExitReason, TrainResult
from agentrl.rollout.journal import Journal
from tests.cli.test_cli import run
from tests.launch.test_run import exported, hold

ENDED = TrainResult(Path("x"), ExitReason.TOTAL_STEPS, steps=1, seconds=1.0)


def make_run(runs: Path, name: str, *settings: str, steps: int = 3) -> Path:
    """A run's folder: settings, metrics, a journal and a checkpoint."""
    folder = runs / name
    folder.mkdir(parents=True)
    recipe = load_recipe("arithmetic_grpo", [f"name={name}", f"launch.run_dir={runs}", *settings], device="cpu")
    (folder / "config.json").write_text(recipe.model_dump_json())
    records = [{"step": step, "time": 1.0, "reward/mean_drawn": 0.1 * step} for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    journal = Journal(folder, episodes=False)
    for draw in range(steps):
        journal.admitted(draw=draw, task=f"t{draw}", seed=draw, version=0)
        journal.group("trained", draw=draw, task=f"t{draw}", step=draw)
    asyncio.run(journal.cut(steps))
    journal.close()
    checkpoint = folder / "checkpoints" / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": steps, "controller": {"epochs": 0}}))
    return folder


def ended(folder: Path, code: int | None, reason: str = "") -> None:
    said = {"host": "h", "boot": "b", "pid": 7, "born": 1.0, "started": 1.0}
    said |= {} if code is None else {"ended": 2.0, "code": code, "reason": reason}
    (folder / "owner.json").write_text(json.dumps(said))
    if code is None:  # a heartbeat that is old
        import os

        os.utime(folder / "owner.json", (1.0, 1.0))


@pytest.fixture
def living(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run whose launcher lives."""
    process = hold(make_run(tmp_path, "living"))
    yield process
    process.kill()
    process.communicate()


def test_runs_are_listed_with_their_states_in_80_columns(
    tmp_path: Path, living: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, code in (("done", 0), ("stopped", 130), ("broken", 1), ("killed", None)):
        ended(make_run(tmp_path, name, "trainer.total_steps=9"), code)
    assert run("runs", "list", "--run-dir", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert run("runs", "list", "--run-dir", str(tmp_path), "--json") == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert {name: one["state"] for name, one in found.items()} == {
        "living": "starting", "done": "finished", "stopped": "stopped", "broken": "failed", "killed": "killed",
    }  # fmt: skip
    assert all(state in out for state in ("finished", "stopped", "failed", "killed", "3/9", "mean 0.300"))
    assert (found["done"]["step"], found["done"]["checkpoint"]) == (3, 3)
    assert found["done"]["value"] == pytest.approx(0.3)


def test_a_run_that_ended_is_shown_with_how_to_go_on(tmp_path: Path, capsys: Any) -> None:
    folder = make_run(tmp_path, "x", "trainer.total_steps=3")
    ended(folder, 1, "trainer was killed by SIGKILL; the end of the log:\nmore")
    assert run("runs", "show", "x", "--run-dir", str(tmp_path)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "failed: trainer was killed by SIGKILL" in out
    assert "a resume only writes what is missing: model/: agentrl runs resume x --run-dir" in out
    exported(folder, 3)
    assert run("runs", "show", str(folder)) == 0
    assert "it has made all its 3 steps" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_goes_on_is_shown_with_what_each_process_waits_for(
    tmp_path: Path, living: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "living"
    (folder / "processes").mkdir()
    (folder / "processes" / "controller.json").write_text("{}")
    waits = [{"process": "trainer", "doing": "waits for the batch of step 3", "seconds": 12.0, "seconds_left": 1788.0}]
    monkeypatch.setattr(run_folders, "live_status", lambda folder: {"waits": waits})
    assert run("runs", "show", "living", "--run-dir", str(tmp_path)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"running, process {living.pid} on" in out
    assert "trainer waits for the batch of step 3, for 12 s, gives up in 30 min" in out


def test_the_journal_of_a_run_is_checked(tmp_path: Path, capsys: Any) -> None:
    folder = make_run(tmp_path, "x")
    assert run("runs", "check", "x", "--run-dir", str(tmp_path)) == 0
    assert "3 draws, each admitted once; ended, each once: 3 trained" in capsys.readouterr().out
    journal = Journal(folder, episodes=False)
    journal.admitted(draw=3, task="t3", seed=3, version=0)
    ended(folder, 0)
    assert run("runs", "check", "x", "--run-dir", str(tmp_path)) == 1
    assert "draw 3, admitted in line 8, never ended" in capsys.readouterr().out
    journal.group("trained", draw=1, task="t1", step=3)
    journal.close()
    assert run("runs", "check", "x", "--run-dir", str(tmp_path), "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["violation"] == "line 9: draw 1 ended as trained; line 4 says trained already"


def test_a_journal_whose_last_lines_are_lost_proves_nothing(tmp_path: Path, capsys: Any) -> None:
    """Checksums alone do not tell: what is left is whole, and a copy that was made too early is, too."""
    journal = make_run(tmp_path, "x") / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-3]))
    assert run("runs", "check", "x", "--run-dir", str(tmp_path)) == 1
    assert "ends after 2 trained steps, and there is a checkpoint after step 3" in capsys.readouterr().out


def test_a_run_is_resumed_with_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, "x", "trainer.learning_rate=0.125").rename(tmp_path / "y")
    given: list[Any] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: given.append(recipe) or ENDED)
    assert run("runs", "resume", "y", "trainer.total_steps=77", "--run-dir", str(tmp_path)) == 0
    (recipe,) = given
    assert (recipe.name, recipe.launch.run_dir) == ("y", str(tmp_path))
    assert (recipe.trainer.total_steps, recipe.trainer.learning_rate) == (77, 0.125)
    assert run("runs", "resume", "y", "trainer.total_stepz=7", "--run-dir", str(tmp_path)) == 2


def test_two_runs_are_compared(tmp_path: Path, capsys: Any) -> None:
    make_run(tmp_path, "a"), make_run(tmp_path, "b", "trainer.learning_rate=0.125", steps=5)
    assert run("runs", "diff", "a", "b", "--run-dir", str(tmp_path), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["settings"]) == ["trainer.learning_rate"] and said["settings"]["trainer.learning_rate"][1] == 0.125
    assert said["metrics"] == {"reward/mean_drawn": [0.1 * 3, 0.5], "step": [3, 5]}
    assert run("runs", "diff", "a", "b", "--run-dir", str(tmp_path)) == 0
    assert "trainer.learning_rate" in capsys.readouterr().out


def test_two_evaluations_are_compared_by_their_results(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "800")
    folders = [tmp_path / place / "x" for place in ("one", "other")]
    for folder, accuracy in zip(folders, (0.3, 0.6), strict=True):
        folder.mkdir(parents=True)
        recipe = load_recipe("arithmetic_grpo", ["trainer.type=null"], device="cpu")
        (folder / "config.json").write_text(recipe.model_dump_json())
        result = {"eval/accuracy": accuracy, "eval/n": 10, "setup": {"model": "m"}}
        (folder / "result.json").write_text(json.dumps(result))
    assert run("runs", "diff", *map(str, folders), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"settings": {}, "metrics": {"eval/accuracy": [0.3, 0.6]}}
    assert run("runs", "diff", *map(str, folders)) == 0
    head = capsys.readouterr().out
    assert all(str(folder) in head for folder in folders), "both are called x"


def test_a_damaged_folder_hides_no_other_run_and_is_named(tmp_path: Path, capsys: Any) -> None:
    make_run(tmp_path, "good"), make_run(tmp_path, "empty"), make_run(tmp_path, "torn")
    (tmp_path / "empty" / "config.json").write_text("")
    with (tmp_path / "torn" / "metrics.jsonl").open("ab") as lines:
        lines.write(b"\0\0\0\n")  # as a power failure leaves it
    assert run("runs", "list", "--run-dir", str(tmp_path), "--json") == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["empty"]["kind"] == run_folders.DAMAGED
    assert found["torn"]["step"] == found["good"]["step"] == 3
    for command in (["show", "empty"], ["diff", "good", "empty"], ["resume", "empty"]):
        assert run("runs", command[0], *command[1:], "--run-dir", str(tmp_path)) == 2
        assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["arithmetic_grpo", "gsm8k_sft"])
def test_a_running_run_without_a_controller_is_shown(tmp_path: Path, capsys: Any, name: str) -> None:
    """An evaluation, and a run that learns from examples."""
    folder = tmp_path / "alone"
    folder.mkdir()
    evaluates = name == "arithmetic_grpo"
    recipe = load_recipe(name, ["trainer.type=null"] if evaluates else [], device="cpu")
    (folder / "config.json").write_text(recipe.model_dump_json())
    if evaluates:
        (folder / "setup.json").write_text("{}")
    process = hold(folder)
    try:
        assert run("runs", "show", "alone", "--run-dir", str(tmp_path)) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f"running, process {process.pid} on" in out and "waits for" not in out
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_is_not_there_is_named(tmp_path: Path, capsys: Any) -> None:
    assert run("runs", "show", "x", "--run-dir", str(tmp_path)) == 2
    assert "no run 'x'" in capsys.readouterr().err
    assert run("runs", "list", "--run-dir", str(tmp_path)) == 0


def test_a_time_has_one_unit() -> None:
    assert [short_time(s) for s in (5, 119, 121, 7300, 200_000)] == ["5 s", "119 s", "2 min", "2 h", "2 d"]


def test_an_evaluation_is_listed_as_running_and_with_its_result(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    recipe = load_recipe("arithmetic_grpo", ["trainer.type=null", f"launch.run_dir={tmp_path}"], device="cpu")
    (folder / "config.json").write_text(recipe.model_dump_json())
    process = hold(folder)
    try:
        assert run_folders.run_info(folder).state == "starting"
        (folder / "setup.json").write_text("{}")
        assert run_folders.run_info(folder).state == "running"
    finally:
        process.kill()
        process.communicate()
    numbers = json.dumps({"eval/accuracy": 0.5, "note": 'a}, "per_task": {', "spent": {}})
    for text in (f'{numbers[:-1]}, "per_task": {{"accuracy": {{"t": 1.0}}}}}}\n', numbers):
        (folder / "result.json").write_text(text)
        found = run_folders.run_info(folder)
        assert (found.metric, found.value, found.step) == ("eval/accuracy", 0.5, None)
    assert run("runs", "list", "--run-dir", str(tmp_path)) == 0
    assert "0.500" in capsys.readouterr().out
    (folder / "result.json").write_text('{"eval')
    assert run_folders.run_info(folder).metric is None
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "asked.json").write_text("{}")
    folder.rename(tmp_path / "several" / "measured")
    assert [one.folder.parent.name for one in run_folders.all_runs(tmp_path)] == ["several"]
