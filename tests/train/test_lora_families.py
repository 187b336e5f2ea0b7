"""Adapters of every kind of family: mixtures with dense layers, state spaces, lists of layers, heads of their own form.

PEFT knows some types of models by name: it moves adapters of dense layers to stacked experts, and refuses layers of
state-space models. Neither happens here: each linear layer of the decoder gets an adapter, and nothing else does.
"""

import re
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors import safe_open

from agentrl.config.adapter import AdapterConfig
from agentrl.models.linear_layers import linear_layers, stacked_share
from agentrl.train.layout_choice import layout_of
from agentrl.train.lora import add_adapter, names_in_files
from agentrl.train.policy import ModelRefused, Policy, load_model
from agentrl.weights.gather import full_tensor
from agentrl.weights.lora_weights import plain_weights
from tests.train.test_families import CHUNK, EXACT, TEMPERATURE, expected, gradients, group, same, weights_of, write
from tests.train.test_rows import collated

LORA = AdapterConfig(lora_rank=4)
SAMPLE = {  # family: why it is one of them
    "qwen3_next": "its experts are stacked beside a dense one, whose layers have the names that experts once had",
    "mamba2": "PEFT refuses its out_proj",
    "zamba2": "the last parts of some paths are numbers, as those of its layers are; layers share weights",
    "modernbert-decoder": "its head has a linear layer of its own",
}
MORE = ("deepseek_v3", "falcon_h1", "gemma3n_text", "glm4_moe", "gpt_oss", "jamba", "nemotron_h", "opt")


def check(family: str, folder: Path) -> None:
    write(family, folder)
    model, plain = load_model(folder, context=64), load_model(folder, context=64)
    linear = {one.path for one in linear_layers(model)}
    add_adapter(model, LORA, seed=0, base="base")
    found = {name: one for name, one in model.named_modules() if isinstance(one, LoraLayer)}
    assert found.keys() == linear and not any(isinstance(one, ParamWrapper) for one in found.values())
    model.train()
    torch.manual_seed(1)
    sequences = group()
    model(torch.tensor([sequences[0].token_ids]), use_cache=False).logits.sum().backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Some classes read a layer's weight without calling it (Jamba's dt_proj): its adapter stays at 0.
            if ".lora_B." in name and parameter.grad is not None:
                parameter.normal_(std=0.1)
    wanted, of_wanted = expected(model, sequences)
    batch = collated(sequences, 200, layout_of(model))
    logprobs, entropies = Policy(model, TEMPERATURE, CHUNK)(batch)
    assert (logprobs.detach() - wanted[batch.places]).abs().max() < EXACT
    weights = weights_of(len(wanted))[batch.places]
    same(gradients(model, (weights * (logprobs - 0.1 * entropies)).sum()), of_wanted)
    ids = torch.tensor([sequences[0].token_ids])
    own, before = model(ids, use_cache=False).logits, plain(ids, use_cache=False).logits
    _, unknown = plain.load_state_dict({n: full_tensor(w) for n, w in plain_weights(model)}, strict=False)
    assert unknown == [], "what is published has the plain model's names"
    torch.testing.assert_close(plain(ids, use_cache=False).logits, own, atol=1e-4, rtol=1e-4)
    assert (before - own).abs().max() > 1e-2


@pytest.mark.parametrize("family", SAMPLE)
def test_each_linear_layer_is_adapted_and_what_is_published_is_the_merged_model(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", MORE)
def test_so_are_those_of_further_families(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_next", "zamba2"])
def test_names_in_files_are_those_of_adapted_layers(family: str, tmp_path: Path) -> None:
    """Ranks that load their own parts map the files' names to a model that has its adapters already."""
    model = load_model(write(family, tmp_path), context=64)
    before = set(dict(model.named_parameters()))
    names = names_in_files(tmp_path, LORA)
    add_adapter(model, LORA, seed=0, base="base")
    after = {name for name, one in model.named_parameters() if not one.requires_grad}
    mapped = set()
    for name in before:
        hits = [re.sub(pattern, other, name) for pattern, other in names.items() if re.search(pattern, name)]
        assert len(hits) <= 1, (name, hits)
        mapped.add(hits[0] if hits else name)
    assert mapped == after
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        experts = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118 - it is no dict
    assert not [name for name in experts for pattern in names if re.search(pattern, name)]


def test_stacked_experts_are_counted(tmp_path: Path, tiny_model: Path) -> None:
    model = load_model(write("mixtral", tmp_path), context=64)
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    assert stacked_share(model) == experts / sum(one.numel() for one in model.parameters())
    assert stacked_share(load_model(tiny_model)) == 0


def test_a_name_that_is_also_another_modules_is_refused_in_one_line(tmp_path: Path) -> None:
    model = load_model(write("gemma3n_text", tmp_path), context=64)
    with pytest.raises(ModelRefused, match=r"trainer\.lora_targets=\['0'\]: ValueError: Target module") as found:
        add_adapter(model, AdapterConfig(lora_rank=4, lora_targets=("0",)), seed=0, base="base")
    assert "\n" not in str(found.value)
