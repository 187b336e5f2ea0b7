"""After three updates of each decoder family, the engine serves the weights that the trainer has.

The weights go the way of a run: the trainer's policy, the published file, its fingerprints, the engine's loader.
"""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.load import load_recipe
from agentrl.core.weight_manifest import mismatches
from agentrl.engine.weight_store import digests, load_weights
from agentrl.launch.resolve import resolve
from agentrl.train.__main__ import make_policy
from agentrl.train.layout_choice import layout_of
from agentrl.train.mesh import RankMesh
from agentrl.train.publishing import make_publisher
from tests.engine.test_families import load
from tests.models.families import FAMILIES, REFUSED, UNSERVED
from tests.models.ways import WAYS_WITH_IMAGES
from tests.train.test_families import group
from tests.train.test_rows import collated

SAMPLE = ("llama", "mixtral", "gemma2", "gpt2", "mamba2", "qwen3_next", "deepseek_v3", "jamba", "gemma3 whole")


def check_family(name: str, folder: Path, dtype: str = "float32") -> None:
    settings = ["inference.context_length=64", "weights.transport=disk", f"inference.dtype={dtype}"]
    recipe = resolve(load_recipe("arithmetic_grpo", [*settings, "trainer.dtype=float32"], device="cpu"), None)
    loaded = load(name, folder, dtype)
    ranks = RankMesh.of_world(torch.device("cpu"))
    policy = make_policy(recipe, folder, ranks, torch.device("cpu"))
    policy.train()
    layout, optimizer = layout_of(policy.model), torch.optim.AdamW(policy.parameters(), lr=1e-2)
    publisher = make_publisher(recipe, policy, folder / "run", torch.device("cpu"), None, ranks, folder)
    before = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    for version in range(1, 4):
        batch = collated(group(), 200, layout)
        policy(batch, lambda chosen, logprobs, entropies: -logprobs.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        manifest = publisher.write(version)
        assert manifest is not None
        load_weights(loaded.model, manifest.path)
        assert mismatches(manifest.fingerprints, digests(loaded.model, "fingerprint")) == []
    publisher.close()
    after = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    assert (after - before).abs().max() > 1e-3
    if dtype == "float32":
        trained = load(name, folder / "again").model  # the same code: another order of sums may choose another expert
        trained.load_state_dict(policy.model.state_dict())
        ids = torch.tensor([group()[0].token_ids])
        with torch.no_grad():
            served, expected = (one(input_ids=ids, use_cache=False).logits for one in (loaded.model, trained))
        torch.testing.assert_close(served, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_characteristic_family_is_served_as_it_was_trained(name: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    check_family(name, tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "mamba2", "deepseek_v3"])
def test_weights_that_a_class_keeps_in_float32_are_verified_in_bfloat16(
    name: str, tmp_path: Path, mesh: DeviceMesh
) -> None:
    check_family(name, tmp_path, "bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*FAMILIES, *WAYS_WITH_IMAGES} - {*SAMPLE, *REFUSED, *UNSERVED}))
def test_every_family_is_served_as_it_was_trained(name: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    check_family(name, tmp_path)
