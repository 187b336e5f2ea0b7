"""The routers' load-balancing loss is that of the model's class, and only of tokens that sequences have."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

from agentrl.models.decoder import decoder_of
from agentrl.models.way import ModelForm, Way, set_form
from agentrl.train.layout_choice import layout_of
from agentrl.train.policy import Policy, load_model, shard
from agentrl.train.router_balance import FUNCTION, NoRouters
from tests.models.families import FAMILIES, small_model
from tests.train.test_families import group
from tests.train.test_rows import collated

MODELS = Path(transformers.__file__).parent / "models"


def loaded(name: str, folder: Path) -> Any:
    small_model(name).save_pretrained(folder)
    return load_model(folder, context=64)


def has_routers(name: str) -> bool:
    """Whether the module of a family's class defines the loss."""
    module = name.replace("-", "_")
    file = MODELS / module / f"modeling_{module}.py"
    return file.is_file() and f"def {FUNCTION}" in file.read_text()


SAMPLE = ("mixtral", "qwen3_moe")
MIXTURES = [name for name in FAMILIES if name not in SAMPLE and has_routers(name)]


def check_family(name: str, folder: Path) -> None:
    model = loaded(name, folder)
    set_form(model, ModelForm(Way("padded", why="it is tested")))
    policy = Policy(model, 1.0, 64, balance=0.5)
    batch = collated(group(), 200, layout_of(model))
    routed = decoder_of(model)(input_ids=batch.token_ids, use_cache=False, output_router_logits=True)
    if not routed.router_logits:  # not in a miniature of two layers
        with pytest.raises(NoRouters, match="no layer"):
            policy(batch)
        return
    policy(batch)
    found = policy.router_loss(batch)
    used = torch.zeros_like(batch.token_ids)
    for row, one in enumerate(group()):
        used[row, : len(one.token_ids) - 1] = 1  # the last token predicts nothing that is trained
    own = model(input_ids=batch.token_ids, attention_mask=used, use_cache=False, output_router_logits=True)
    weights = batch.columns["weights"].sum()
    torch.testing.assert_close(found, 0.5 * own.aux_loss * weights, atol=1e-4, rtol=1e-4)
    assert isinstance(found, torch.Tensor)
    found.backward()
    routers = [p for n, p in policy.named_parameters() if "gate" in n or "router" in n]
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in routers)
    assert policy.router_loss(batch) == 0.0, "it is taken once"


@pytest.mark.parametrize("name", SAMPLE)
def test_it_is_the_models_own_over_the_tokens_of_all_sequences(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", MIXTURES)
def test_it_is_that_of_every_mixture(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


def test_it_is_off_by_default_and_without_gradients(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    batch = collated(group(), 200, layout_of(model))
    quiet = Policy(model, 1.0, 64)
    quiet(batch)
    measured = Policy(model, 1.0, 64, balance=0.5)
    with torch.no_grad():
        measured(batch)
    assert quiet.router_loss(batch) == measured.router_loss(batch) == 0.0


def test_a_sharded_model_with_an_image_tower_keeps_it_in_passes_without_images(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    model = loaded("mixtral", tmp_path)
    batch = collated(group(), 200, layout_of(model))
    policy = Policy(model, 1.0, 64, balance=0.5)
    policy(batch)
    wanted = policy.router_loss(batch)

    class Tower:
        def idle(self, decoder: Any, device: torch.device) -> torch.Tensor:
            return torch.zeros(())

    decoder_of(model).agentrl_pixels = Tower()
    shard(policy, mesh, torch.float32)
    policy(batch)
    found = policy.router_loss(batch)
    assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(found, wanted)


def test_a_model_without_routers_is_refused_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(NoRouters, match=r"trainer\.router_aux_loss"):
        Policy(loaded("llama", tmp_path), 1.0, 64, balance=0.1)
