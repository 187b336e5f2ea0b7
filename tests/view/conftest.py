"""Runs for the view: small ones that were made, with what a hostile model may have said."""

import json
from pathlib import Path

import orjson
import pytest

from agentrl.bench.made_run import made_episode, make_run
from agentrl.view.shown_runs import ShownRun, shown_runs

HOSTILE = '<img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script></script>&lt;b&gt;'


def hostile_episode() -> dict:
    import random

    record = made_episode(0, random.Random(1))
    record |= {"group_id": "g-hostile", "task_id": 'train/"odd" <b>', "reward": None, "stop_reason": "agent_error"}
    record |= {"error": f"Traceback\nValueError: {HOSTILE}", "metrics": {}}
    record["trajectories"]["assistant"]["nodes"][-1]["message"]["content"] = HOSTILE
    return record


def append(file: Path, *records: dict) -> None:
    with file.open("ab") as opened:
        opened.write(b"".join(orjson.dumps(record) + b"\n" for record in records))


@pytest.fixture
def runs_folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "first", 64)
    make_run(tmp_path / "runs" / "second", 32, tokens=40)
    append(tmp_path / "runs" / "first" / "episodes.jsonl", hostile_episode())
    return tmp_path / "runs"


@pytest.fixture
def runs(runs_folder: Path, tmp_path: Path) -> list[ShownRun]:
    found = shown_runs(["first", "second"], runs_folder, tmp_path / "cache")
    for run in found:
        run.index.update()
    return found


@pytest.fixture
def run(runs: list[ShownRun]) -> ShownRun:
    return runs[0]


def records_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
