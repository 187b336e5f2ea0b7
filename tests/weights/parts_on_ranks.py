"""A mixture of experts whose ranks each write their own parts, for ``tests/weights/test_parts_on_ranks.py``.

``python -m tests.weights.parts_on_ranks FOLDER FAMILY MESH`` fails on the rank on which a promise does not hold.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from agentrl.core.weight_manifest import SAMPLED, fingerprint
from agentrl.train.export import export_model, exported_weights, saved_buffers
from agentrl.weights.file_names import FileWeight, file_weights
from agentrl.weights.file_publisher import WeightPublisher
from agentrl.weights.gather import own_part
from tests.models.families import small_model
from tests.tiny import build_tiny_tokenizer
from tests.train.meshes import MESHES, engine_of, recipe_of
from tests.train.ranks import on_ranks

LARGEST = 100_000  # bytes of a file
LITTLE = 0.05  # share of the model's bytes that fingerprints and messages may have
COLLECTIVES = ("c10d", "_c10d_functional")


class Received(TorchDispatchMode):
    """Counts the bytes that collectives leave on this rank while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes again with the parts
        made = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES and "wait" not in func.name():
            self.bytes += sum(one.nbytes for one in tree_leaves(made) if isinstance(one, Tensor))
        return made


def build_model(folder: Path, family: str) -> None:
    """Writes a model of experts; its buffers are no zeros."""
    build_tiny_tokenizer(folder)
    model = small_model(family)
    for buffer in saved_buffers(model):
        model.get_buffer(buffer).uniform_()
    model.save_pretrained(folder)


def check(folder: Path, name: str, rank: int) -> None:
    """Exports and pushes, each rank its own parts, and compares with what is gathered."""
    ranks, choices = MESHES[name]
    engine = engine_of(recipe_of(folder, ranks, choices), folder)
    model, mesh = engine.policy.model, engine.mesh
    weights = exported_weights(model, adapter=False)
    named = file_weights(model, weights)
    made = [(one, weight) for one, weight in named if isinstance(weight, FileWeight)]
    assert made and all(weight.cut is not None for _, weight in made), "experts are cut"

    received = {}
    for gather in (True, False):
        target = folder / f"{name}-{gather}"
        with Received() as received[gather]:
            export_model(
                engine.policy, weights, target, 3, folder, mesh, adapter=False, gather=gather, largest=LARGEST
            )  # fmt: skip
    parts, gathered, started = (weights_in(folder / one) for one in (f"{name}-False", f"{name}-True", ""))
    assert len(list((folder / f"{name}-False").glob("model-*.safetensors"))) > 1, "a model of several files"
    assert same(gathered, started), "buffers and weights, which no update has changed"
    assert same(parts, gathered), "another export"
    AutoModelForCausalLM.from_pretrained(folder / f"{name}-False")
    whole = {one: gathered[one] for one, _ in named}
    size = sum(one.nbytes for one in whole.values())
    assert received[True].bytes > 0.9 * size, "a gathered export is counted"
    assert received[False].bytes < LITTLE * size, f"rank {rank} received {received[False].bytes} of {size} bytes"

    place = (mesh.tensor_rank, mesh.shape.tensor)
    pushed = WeightPublisher(named, torch.float32, "disk", folder / name, is_writer=rank == 0, tensor=place)
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                own_part(parameter).mul_(2)
        with Received() as during:
            manifest = pushed.write(version)
        assert during.bytes < LITTLE * size, f"rank {rank} received {during.bytes} of {size} bytes"
        if manifest is not None:
            found = load_file(manifest.file)
            assert same(found, {one: tensor * 2**version for one, tensor in whole.items()}), "another push"
            data: dict[str, Any] = {one: tensor.numpy() for one, tensor in found.items()}
            assert manifest.fingerprints == {one: fingerprint(memoryview(held)) for one, held in data.items()}
            assert len(manifest.samples) == 4
            assert all(found[one].view(-1)[:SAMPLED].tolist() == values for one, values in manifest.samples.items())
        dist.barrier()
    pushed.close()


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Returns what all files of a model hold."""
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in found.items())


def main(folder: str, family: str, name: str) -> None:
    torch.set_num_threads(1)
    build_model(Path(folder), family)
    on_ranks(MESHES[name][0], partial(check, Path(folder), name))


if __name__ == "__main__":
    main(*sys.argv[1:])
