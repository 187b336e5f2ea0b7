"""The benchmark of plain rows runs on the tiny model, both sides of it."""

from pathlib import Path

from agentrl.bench.bench_models import run


def test_both_sides_are_measured_in_turns(tiny_model: Path) -> None:
    figures = run(str(tiny_model), repeats=2, dtype="float32")
    assert figures.keys() == {"plain_vs_trl", "plain_s", "trl_s"}
    for ratio, plain, trl in zip(*(figures[key] for key in ("plain_vs_trl", "plain_s", "trl_s")), strict=True):
        assert plain > 0 and ratio == plain / trl
