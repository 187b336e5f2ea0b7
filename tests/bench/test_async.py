"""The benchmark of the asynchronous core, in small: each part gives its figures."""

import pytest

from agentrl.bench import bench_async


def test_each_part_gives_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_async, "SEQUENCES", 16)
    monkeypatch.setattr(bench_async, "IN_FLIGHT", 32)
    monkeypatch.setattr(bench_async, "TRAIN_SECONDS", 20.0)
    monkeypatch.setattr(bench_async, "SIGMAS", (0.8,))
    monkeypatch.setattr(bench_async, "BOUNDS", (0, 2))
    found = bench_async.simulated(steps=3)
    (fraction,), (wasted,), (over,) = (found[key] for key in ("bound_fraction", "wasted", "over_synchronous"))
    assert 0 < found["bound_fraction_s0.8_3+1_b0"][0] < fraction <= 1.1
    assert 0 <= wasted < 1 and over > 1
    grown = bench_async.growth(2560, short=256)
    assert grown.keys() == {"cpu_per_1k", "cpu_per_1k_episodes", "cpu_growth", "rss_growth"}
    assert all(value > 0 for (value,) in grown.values())
    assert bench_async.crowds(1, episodes=8, turns=3)["crowd_cost"][0] > 0
