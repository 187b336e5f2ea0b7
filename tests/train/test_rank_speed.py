"""Which of the trainer's ranks is slower than the rest."""

import pytest
import torch
import torch.distributed as dist

from agentrl.train import rank_speed
from agentrl.train.rank_speed import IN_A_ROW, RankSpeed, slowest

CPU = torch.device("cpu")


def test_the_slowest_rank_is_compared_with_the_median_of_the_others() -> None:
    assert slowest([1.0, 2.0]) == (1, 2.0)
    assert slowest([3.0, 1.0, 1.5, 1.25]) == (0, 3.0 / 1.25)
    assert slowest([1.0, 1.0, 1.0, 1.0]) == (0, 1.0)
    assert slowest([10.0, 1.0, 10.0, 1.0, 1.0]) == (0, 10.0), "two slow ranks do not hide one another"


class Ranks:
    """The collectives of a world, played by its first rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: list[float]) -> None:
        self.times = times
        monkeypatch.setattr(dist, "get_world_size", lambda: len(self.times))
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "all_gather_object", self._hosts)
        monkeypatch.setattr(dist, "all_gather_into_tensor", self._gather)

    def _hosts(self, found: list[str], mine: str) -> None:
        found[:] = [f"host-{rank}" for rank in range(len(self.times))]

    def _gather(self, found: torch.Tensor, mine: torch.Tensor) -> None:
        found.copy_(torch.tensor([float(mine), *self.times[1:]]))


def test_a_rank_is_named_once_after_several_steps_in_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(monkeypatch, [1.0, 1.0, 2.5, 1.0])
    speed = RankSpeed(CPU, lambda: ranks.times[0])
    for _ in range(IN_A_ROW - 1):
        assert speed.measure() == {"ranks/slowest": 2.0, "ranks/slowdown": 2.5, "ranks/slow": 0.0}
    ranks.times = [1.0, 1.0, 1.1, 1.0]  # a moment's load is over
    speed.measure()
    assert capsys.readouterr().out == ""
    ranks.times = [1.0, 1.0, 2.5, 1.0]
    for _ in range(IN_A_ROW + 2):
        speed.measure()
    said = capsys.readouterr().out
    assert said.count("trainer rank 2 on host-2 takes 2.5 times as long") == 1


def test_all_slow_ranks_of_a_machine_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which of them is the slowest changes from step to step."""
    ranks = Ranks(monkeypatch, [])
    speed = RankSpeed(CPU, lambda: ranks.times[0])
    found: dict[str, float] = {}
    for step in range(IN_A_ROW):
        ranks.times = [1.0, 1.0, 2.0 + step % 2, 3.0 - step % 2]
        found = speed.measure()
    assert found["ranks/slow"] == 2
    said = capsys.readouterr().out
    assert [f"rank {rank} on" in said for rank in range(4)] == [False, False, True, True]


def test_one_rank_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(monkeypatch, [1.0])
    assert RankSpeed(CPU, lambda: pytest.fail("measured")).measure() == {}


def test_a_trial_is_some_work_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rank_speed.SIDE, "cpu", 8)
    ranks = Ranks(monkeypatch, [0.0, 1e9])
    assert RankSpeed(CPU).measure()["ranks/slowest"] == 1.0
    assert 0 < RankSpeed(CPU)._trial() < ranks.times[1]
