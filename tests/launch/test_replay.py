"""Replays of steps that hold nothing to compare; whole ones are in test_end_to_end.py."""

from agentrl.cli.replay import is_same
from agentrl.launch.replay import StepReplay


def test_a_step_of_which_nothing_can_be_replayed_is_not_the_same() -> None:
    assert not is_same(StepReplay(1, [], {"no requests in traffic.jsonl": 4}, whole=False), "float32")
