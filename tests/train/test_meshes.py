"""Training is the same on every mesh of ranks, and goes on from a checkpoint of any on any other."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end import ROOT
from tests.train.meshes import KINDS, MESHES

TOLERANCE = 1e-5
OF_THE_PLAN = {"train/microbatches", "train/rows_tokens"}  # how rows are divided, which a mesh may change
QUICK = ("llama:hsdp_zero3", "llama:fsdp_tp", "sequences:cp", "llama:fsdp_tp->cp", "moe:tp->1", "balanced_sequences:cp")


def train(folder: Path, names: Sequence[str]) -> Path:
    """Trains on meshes in one process that forks their ranks; the models of ``folder`` are made if missing."""
    firsts = dict.fromkeys(f"{name.partition(':')[0]}:1" for name in names)
    command = [sys.executable, "-m", "tests.train.meshes", str(folder), *dict.fromkeys([*firsts, *names])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


def assert_same(folder: Path, name: str) -> None:
    """Compares parameters and metrics of a mesh with those of one rank."""
    kind, _, mesh = name.partition(":")
    expected, found = (load_file(folder / f"{one}.safetensors") for one in (f"{kind}:1", name))
    assert found.keys() == expected.keys()
    gaps = {key: (found[key] - tensor).abs().max().item() for key, tensor in expected.items()}
    assert max(gaps.values()) < TOLERANCE, sorted(gaps.items(), key=lambda item: item[1])[-3:]
    alone, together = (json.loads((folder / f"{one}.json").read_text()) for one in (f"{kind}:1", name))
    for step, (one, other) in enumerate(zip(alone[-len(together) :], together, strict=True)):
        assert one.keys() == other.keys()
        for key in one.keys() - OF_THE_PLAN:
            assert math.isclose(one[key], other[key], rel_tol=1e-3, abs_tol=1e-4), (
                mesh,
                step,
                key,
                one[key],
                other[key],
            )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("meshes"), QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_three_steps_give_the_parameters_and_metrics_of_one_rank(name: str, trained: Path) -> None:
    assert_same(trained, name)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_is_the_same_on_every_mesh_that_it_runs_on(kind: str, tmp_path: Path) -> None:
    names = [f"{kind}:{mesh}" for mesh in MESHES if mesh != "1" and runs_on(kind, mesh)]
    train(tmp_path, names)
    for name in names:
        assert_same(tmp_path, name)


@pytest.mark.long
def test_a_checkpoint_of_any_mesh_goes_on_on_any_other(tmp_path: Path) -> None:
    meshes = [mesh for mesh in MESHES if runs_on("llama", mesh) and mesh != "hsdp_zero3"]  # saved as hsdp is
    names = [f"llama:{first}->{second}" for first, second in itertools.product(meshes, meshes)]
    train(tmp_path, names)
    for name in names:
        assert_same(tmp_path, name)


def runs_on(kind: str, mesh: str) -> bool:
    """Whether a kind of model can be split as a mesh says."""
    keys = MESHES[mesh][1]
    if "expert_parallel" in keys:
        return KINDS[kind][0] == "moe"
    return kind != "lora" or "tensor_parallel" not in keys
