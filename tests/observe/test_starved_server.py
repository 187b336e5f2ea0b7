"""A server that got too little of the CPU is named, and healthy runs are not."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import load_recipe
from agentrl.core.episode import EpisodeBase, StopReason
from agentrl.observe.examine_run import examine
from agentrl.observe.starved_server import starved
from agentrl.rollout.failure_kinds import kind_of


def config(**changes: Any) -> dict[str, Any]:
    made = load_recipe("arithmetic_grpo", ["launch.device=cpu"], device="cpu").model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        made[section][name] = value
    return made


def late() -> str:
    """The kind of an episode that was cancelled at its deadline, as `rollout/deadline.py` words it."""
    error = "no end within 300 s (rollout.episode_timeout), in client.py:12 generate"
    made = EpisodeBase(group_id="g", task_id="t", index=0, seed=0, stop_reason=StopReason.TIMEOUT, error=error)
    return kind_of(made)


def test_timeouts_beside_a_lowered_server_suggest_its_niceness() -> None:
    found = starved(Counter({late(): 64}), config(), (9.5, 2))
    assert found is not None and found.kind == "starved"
    assert "inference.niceness=0" in found.remedy and "load now 9.5 on 2 cores" in found.cause
    assert "64 episodes" in found.symptom and "episode_timeout=300 s" in found.symptom


@pytest.mark.parametrize(
    ("failures", "changes"),
    [
        ({late(): 7}, {}),
        ({late(): 10, "environment_error: ValueError": 30}, {}),
        ({late(): 64}, {"inference__niceness": 0}),
        ({late(): 64}, {"launch__device": "cuda"}),
        ({late(): 64}, {"inference__urls": ["http://10.0.0.1:30000"]}),
        ({late(): 64}, {"trainer__type": None}),
        ({}, {}),
    ],
)
def test_other_runs_are_not_judged(failures: dict[str, int], changes: dict[str, Any]) -> None:
    assert starved(Counter(failures), config(**changes), (9.5, 2)) is None


def test_the_doctor_reads_it_from_a_runs_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/accuracy": 0.0}) + "\n")
    (tmp_path / "failed-episodes.jsonl").write_text((json.dumps({"kind": late()}) + "\n") * 20)
    assert [finding.kind for finding in examine(tmp_path)[0]] == ["starved"]
    (tmp_path / "failed-episodes.jsonl").unlink()
    assert examine(tmp_path)[0] == []
