"""The benchmark of plain rows runs on the tiny model, all sides of it."""

from pathlib import Path

from agentrl.bench.bench_models import run


def test_all_sides_are_measured_in_turns(tiny_model: Path) -> None:
    figures = run(str(tiny_model), repeats=2, dtype="float32")
    assert figures.keys() == {"plain_vs_trl", "packed_vs_trl", "plain_s", "packed_s", "trl_s"}
    for side in ("plain", "packed"):
        for ratio, ours, trl in zip(*(figures[key] for key in (f"{side}_vs_trl", f"{side}_s", "trl_s")), strict=True):
            assert ours > 0 and ratio == ours / trl
