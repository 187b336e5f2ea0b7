"""Tests memory-saving norms and MLPs: the same results, and fewer bytes kept for the backward pass."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.launch.dry_run import model_shape
from agentrl.models.prefix_tree import PrefixTree
from agentrl.train.memory_saving import use_memory_saving_layers
from agentrl.train.row_attention import use_tree_attention
from agentrl.train.tree_attention import TreeTiles

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MODELS = {  # how many modules of each are replaced: norms, and MLPs
    "llama": (LlamaConfig, LlamaForCausalLM, 7),
    "mistral": (MistralConfig, MistralForCausalLM, 7),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, 7),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, 11),  # norms of queries and keys, too
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, 0),  # another norm, another activation
}
IDS = torch.arange(2 * 9).view(2, 9) % 64


def make_model(name: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    config, model, _ = MODELS[name]
    torch.manual_seed(0)
    made: Any = model(config(**SHAPE | sizes)).to(dtype)  # type: ignore[arg-type]
    for parameter in made.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)  # norms start at one, where a wrong product would not be seen
    return made


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(input_ids=IDS, use_cache=False).logits
    out.float().square().mean().backward()
    return {"out": out} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    own = make_model(name, dtype)
    lean = copy.deepcopy(own)
    assert use_memory_saving_layers(lean) == MODELS[name][2]
    wanted, found = gradients(own), gradients(lean)
    assert wanted.keys() == found.keys()
    # bfloat16: sums in another order round to a neighbour; the loss is then the same to some thousandths.
    tolerance = 2e-6 if dtype == torch.float32 else 0.02
    for key, value in wanted.items():
        assert (found[key] - value).abs().max() <= tolerance * value.abs().max() + 1e-9, key


def kept(model: Any, tokens: int) -> int:
    """Counts the bytes that a model's layers keep for the backward pass."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    row = PrefixTree()
    row.add([token % 64 for token in range(tokens)])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        held = model.get_decoder()(
            input_ids=torch.tensor([row.token_ids]),
            position_ids=torch.tensor([row.positions]),
            attention_mask=TreeTiles(torch.tensor(row.ends)),
            use_cache=False,
        )
    assert held is not None  # until here: addresses of what was freed would be found twice
    for parameter in model.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def test_half_is_kept_and_the_plan_says_how_much() -> None:
    model = make_model("llama", torch.bfloat16, hidden_size=128, intermediate_size=384, head_dim=32)
    use_tree_attention(model)
    before = kept(model, 400)
    use_memory_saving_layers(model)
    now = kept(model, 400)
    assert now < 0.6 * before
    shape = model_shape(model.config.to_dict())
    assert 2 * 400 * shape.kept == pytest.approx(now, rel=0.1)


def test_frozen_weights_get_no_gradient_and_pass_one_on() -> None:
    model = make_model("llama").requires_grad_(False)
    use_memory_saving_layers(model)
    model.get_input_embeddings().requires_grad_(True)
    found = gradients(model)
    assert found.keys() == {"out", "model.embed_tokens.weight"} or found.keys() == {"out", "lm_head.weight"}


class Doubled(nn.Module):
    """A layer with a norm's attributes that computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, states: Tensor) -> Tensor:
        return 2 * states


class Gated(Doubled):
    """A norm with an optional gate."""

    def forward(self, states: Tensor, gate: Tensor | None = None) -> Tensor:
        normal = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normal * (1.0 if gate is None else gate)


@pytest.mark.parametrize("kind", [Doubled, Gated])
def test_what_only_looks_alike_is_left_alone(kind: type[Doubled]) -> None:
    module = kind()
    before = module.forward
    assert use_memory_saving_layers(module) == 0
    assert module.forward == before
