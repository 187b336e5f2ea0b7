"""The benchmark of the mesh, on the tiny model; times are not asserted."""

from pathlib import Path

import pytest

from agentrl.bench.bench_mesh import run


@pytest.mark.long
def test_a_tiny_model_gives_all_figures(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the processes that it starts
    figures = run(str(tiny_model), repeats=1)
    assert {"load_peak_vs_shard", "export_vs_gather", "hosts_vs_local"} <= figures.keys()
    assert all(len(values) == 1 and values[0] > 0 for values in figures.values())
    assert not list(tmp_path.glob("torchelastic_*")), "torchrun leaves nothing behind"
