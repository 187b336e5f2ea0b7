"""Replays of steps that hold nothing to compare; whole ones are in test_end_to_end.py."""

from pathlib import Path

import pytest

from agentrl.cli.replay import is_same
from agentrl.core.columns import Columns
from agentrl.launch.replay import Replay, StepReplay
from tests.rollout.test_stale_groups import episode


def test_a_step_of_which_nothing_can_be_replayed_is_not_the_same() -> None:
    assert not is_same(StepReplay(1, [], {"no requests in traffic.jsonl": 4}, whole=False), "float32")


def test_no_update_is_computed_from_a_part_of_its_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves lines out of episodes.jsonl, and the metrics know how many episodes there were."""
    made = object.__new__(Replay)
    made.run_dir, made._recorded_metrics = (
        tmp_path,
        [{"step": 1.0, "train/learning_rate": 0.1, "rollout/episodes": 4.0}],
    )
    monkeypatch.setattr(Replay, "_batch", lambda *_: Columns.of([episode(index, [0]) for index in range(3)]))
    found = made.update(StepReplay(1, []))
    assert not found.update and found.why_no_update == "3 of the 4 episodes that the run trained are there"
