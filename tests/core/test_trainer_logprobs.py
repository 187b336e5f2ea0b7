"""The file of the trainer's logprobs: what is written of an episode is found again, and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from agentrl.core.trainer_logprobs import FILE, gaps_line, read_gaps

GAPS = {"assistant": {1: [0.25, -3e-4, float("nan")], 3: [1e9]}, "judge": {2: [0.0]}}


def record(index: int = 0, group: str = "g1") -> dict[str, object]:
    return {"group_id": group, "index": index, "attempt": 1, "retried": False}


def test_gaps_are_read_to_three_digits_by_role_and_message(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(gaps_line(4, "g1", 0, GAPS))
    found = read_gaps(tmp_path, record())
    assert {role: list(own) for role, own in found.items()} == {"assistant": [1, 3], "judge": [2]}
    assert found["assistant"][1][:2] == pytest.approx([0.25, -3e-4], rel=1e-3) and np.isnan(found["assistant"][1][2])
    assert found["assistant"][3] == pytest.approx([65504.0]), "beyond the largest number"


def test_the_last_line_of_an_episode_counts_and_others_are_others(tmp_path: Path) -> None:
    odd = 'g1", "index": 0'
    lines = [
        gaps_line(1, "g1", 0, {"a": {0: [1.0]}}),
        gaps_line(1, "g1", 1, {"a": {0: [2.0]}}),
        gaps_line(1, "g1", 11, {"a": {0: [3.0]}}),
        gaps_line(1, "g11", 0, {"a": {0: [4.0]}}),
        gaps_line(1, odd, 0, {"a": {0: [5.0]}}),
        gaps_line(2, "g1", 0, {"a": {0: [6.0]}}),
    ]
    (tmp_path / FILE).write_text("".join(lines))
    keys = (record(), record(1), record(11), record(group="g11"), record(group=odd))
    assert [read_gaps(tmp_path, one)["a"][0].tolist() for one in keys] == [[6.0], [2.0], [3.0], [4.0], [5.0]]
    assert read_gaps(tmp_path, record(7)) == {} and read_gaps(tmp_path, {}) == {}
    assert read_gaps(tmp_path, record() | {"retried": True}) == {}, "a later attempt was trained"


def test_half_a_line_an_empty_file_and_none_say_nothing(tmp_path: Path) -> None:
    assert read_gaps(tmp_path, record()) == {}
    (tmp_path / FILE).touch()
    assert read_gaps(tmp_path, record()) == {}
    whole = gaps_line(1, "g1", 0, {"a": {0: [1.0]}})
    (tmp_path / FILE).write_text(whole + whole[:-5])
    assert read_gaps(tmp_path, record()) == {}, "it is written on: the next look has it"
    (tmp_path / FILE).write_text('{"group_id": "g1", "index": 0, "step": 1, "gaps": {"a": [1]}}\n')
    assert read_gaps(tmp_path, record()) == {}
