"""The benchmark of a start on Ray, in small; times are not asserted."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is an extra: make test-cluster installs it")
from agentrl.bench.bench_ray import run  # needs Ray
from tests.end_to_end import processes_of

pytestmark = pytest.mark.cluster


def test_a_tiny_model_gives_all_figures_and_leaves_no_process(tiny_model: Path) -> None:
    figures = run(str(tiny_model), repeats=1)
    assert figures.keys() == {"ray_cluster_s", "local_start_s", "ray_start_s", "ray_start_extra_s"}
    assert all(len(values) == 1 for values in figures.values())
    assert figures["local_start_s"][0] > 0 and figures["ray_cluster_s"][0] > 0
    assert processes_of(tiny_model) == []
