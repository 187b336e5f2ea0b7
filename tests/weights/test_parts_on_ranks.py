"""Experts of several ranks are exported and pushed without a rank that receives the model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end import ROOT

MESHES = [("deepseek_v3", "2"), *(("qwen3_moe", mesh) for mesh in ("2", "ep", "fsdp_tp", "hsdp", "fsdp_tp_ep"))]


@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_each_rank_writes_its_parts_and_receives_next_to_nothing(family: str, mesh: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.weights.parts_on_ranks", str(tmp_path), family, mesh]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
