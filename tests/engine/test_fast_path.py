"""The leaner forward against the models' own, for each layout it takes."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agentrl.bench.report import default_model
from agentrl.engine import fast_path as fast_path_module
from agentrl.engine import operators as operators_module
from agentrl.engine.fast_path import FastPath, _attend_to_itself, fast_path, fits, mean_difference
from agentrl.engine.model import LoadedModel
from agentrl.engine.native.build import native
from agentrl.engine.operators import NativeOperators, TorchOperators
from agentrl.engine.packed_weights import native_bfloat16
from agentrl.engine.runner import ModelRunner
from agentrl.engine.weight_store import copy_weights, load_weights

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
FAMILY = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "wide heads": LlamaConfig(**SMALL, head_dim=16),
    "no sharing": LlamaConfig(**SMALL | {"num_key_value_heads": 6}),
    "long rope": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
}  # fmt: skip


OTHERS = {  # their own forward
    "gpt2": GPT2Config(
        vocab_size=300, n_embd=48, n_layer=3, n_head=6, n_positions=128, initializer_range=0.2, bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt neox": GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "phi": PhiConfig(**SMALL),
    "cohere": CohereConfig(**SMALL),
    "granite": GraniteConfig(**SMALL, logits_scaling=2.0, attention_multiplier=0.3),
    "gemma": GemmaConfig(**SMALL, head_dim=8),
    "olmo2": Olmo2Config(**SMALL),
    "qwen3 moe": Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}  # fmt: skip


def make(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():  # norms of ones and biases of zeros would hide faults
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def runner_of(model: PreTrainedModel) -> ModelRunner:
    loaded = LoadedModel(
        path="", model=model, tokenizer=None, context_length=128, eos_ids=frozenset(), vocab_size=300, layers=3
    )  # fmt: skip
    return ModelRunner(loaded, 8)


def plain(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize(
    ("name", "operators"),
    [(name, kind) for name in FAMILY for kind in ("torch", "compiled")] + [(name, "its own") for name in OTHERS],
)
def test_prefill_and_decode_give_the_models_own_logits(
    name: str, operators: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if operators == "compiled" and native() is None:
        pytest.skip("there is no C++ compiler here")
    if operators == "torch":
        monkeypatch.setattr(fast_path_module, "native", lambda: None)
    model = make(FAMILY.get(name) or OTHERS[name])
    runner = runner_of(model)
    assert (runner.fast.operators.name if runner.fast else "its own") == operators
    prompts = [[*list(range(20)), 7], [*list(range(20)), 9, 11], [250]]
    for turn in range(2):  # the second time from a kept prefix
        logits = runner.prefill(prompts, [[0, 1], [2], [3]])
        for row, ids in zip(logits, prompts, strict=True):
            torch.testing.assert_close(row, plain(model, ids), atol=2e-4, rtol=1e-4)
        sequences = [[*prompts[0]], [*prompts[0]], [*prompts[1]], [*prompts[2]]]
        logits = runner.prefill([range(90)], [[4]])
        torch.testing.assert_close(logits[0], plain(model, list(range(90))), atol=2e-4, rtol=1e-4)
        sequences.append(list(range(90)))  # much longer than the others: it is attended to by itself
        for step in range(5):
            for slot, ids in enumerate(sequences):
                ids.append(30 * slot + step + turn)
            rows = runner.decode([ids[-1] for ids in sequences], [len(ids) - 1 for ids in sequences])
            for row, ids in zip(rows, sequences, strict=True):
                torch.testing.assert_close(row, plain(model, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("units", [False, True], ids=["own products", "oneDNN's products, as with AMX"])
@pytest.mark.parametrize("name", FAMILY)
def test_compiled_operators_compute_bfloat16_as_torch_does(
    name: str, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rounds elsewhere: both are about as far from the float32 model, and not further."""
    monkeypatch.setattr(operators_module, "matrix_units", lambda: units)
    library = native()
    if library is None:
        pytest.skip("there is no C++ compiler here")
    if not native_bfloat16():
        pytest.skip("this CPU has no bfloat16 products: models are served in float32")
    model = make(FAMILY[name])
    tokens, positions = torch.arange(0, 300, 7), torch.arange(43)
    attend = partial(_attend_to_itself, kv_heads=model.config.num_key_value_heads)
    with torch.inference_mode():
        exact = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        halved = model.bfloat16()
        gaps = [
            (FastPath(halved, operators)(tokens, positions, attend).float().log_softmax(-1) - exact).abs().mean().item()
            for operators in (TorchOperators(), NativeOperators(library))
        ]
    assert gaps[1] < 1.2 * gaps[0] + 1e-3 and gaps[0] < 0.1, gaps


@pytest.mark.skipif(not native_bfloat16(), reason="this CPU has no bfloat16 products: models are served in float32")
def test_decode_steps_in_bfloat16_follow_the_models_own() -> None:
    model = make(FAMILY["llama"]).bfloat16()
    runner = runner_of(model)
    assert runner.fast is not None
    sequences = [[*range(20), 7], [250], list(range(90))]
    runner.prefill(sequences, [[0], [1], [2]])
    for step in range(5):
        for slot, ids in enumerate(sequences):
            ids.append(30 * slot + step)
        rows = runner.decode([ids[-1] for ids in sequences], [len(ids) - 1 for ids in sequences])
        assert rows.dtype == torch.float32
        for row, ids in zip(rows, sequences, strict=True):
            gap = (row.log_softmax(-1) - plain(model, ids).float().log_softmax(-1)).abs().mean().item()
            assert gap < 0.1, "another sequence's logits would be some units away"


def test_new_weights_are_seen_after_repacking() -> None:
    model, other = make(FAMILY["qwen3"]), make(FAMILY["qwen3"], seed=1)
    runner = runner_of(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    runner.weights_changed()
    logits = runner.prefill([[1, 2, 3]], [[0]])
    torch.testing.assert_close(logits[0], plain(other, [1, 2, 3]), atol=2e-4, rtol=1e-4)


ALIGNED = SMALL | {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 320}  # whole panels


@pytest.mark.parametrize("sizes", [SMALL, ALIGNED], ids=["remainders", "whole panels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_are_adopted_and_then_changed_in_parts(
    tmp_path: Path, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Into parameters and packed copies at once; what is copied later must reach the packed copies, too."""
    config = LlamaConfig(**sizes, attention_bias=True)
    model, other, third = (make(config, seed).to(dtype) for seed in range(3))  # type: ignore[arg-type]
    runner = runner_of(model)
    other.save_pretrained(tmp_path)
    adopted: list[bool] = []

    def adopt(parameter: torch.Tensor, values: torch.Tensor) -> bool:
        adopted.append(runner.adopt(parameter, values))
        return adopted[-1]

    tolerance = 2e-4 if dtype == torch.float32 else 0.5

    def check(wanted: PreTrainedModel) -> None:
        runner.weights_changed()
        for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        logits = runner.prefill([[1, 2, 3]], [[0]])
        torch.testing.assert_close(logits[0], plain(wanted, [1, 2, 3]).float(), atol=tolerance, rtol=1e-2)

    load_weights(model, str(tmp_path), adopt)
    check(other)
    compiled = runner.native is not None and dtype in runner.native.products
    assert any(adopted) == compiled
    if compiled and sizes is ALIGNED:
        assert sum(adopted) == 7 * 3 + 1, "all linear layers"
    part = {n: p for n, p in third.named_parameters() if "layers.1.self_attn.k_proj" in n or "lm_head" in n}
    copy_weights(model, part)
    copy_weights(other, part)
    check(other)


@pytest.mark.parametrize(
    "config",
    [
        GemmaConfig(**SMALL, head_dim=8),
        LlamaConfig(**SMALL, hidden_act="gelu"),
    ],
    ids=["another layout", "another activation"],
)
def test_other_models_keep_their_own_forward(config: Any) -> None:
    model = make(config)
    assert not fits(model) and fast_path(model) is None
    assert runner_of(model).packed is not None


def test_double_precision_is_left_alone() -> None:
    assert not fits(make(FAMILY["llama"]).double())


def test_a_model_that_says_something_else_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    """The layout fits, but the forward was changed: tried and refused."""
    model = make(FAMILY["llama"])
    assert mean_difference(FastPath(model, TorchOperators()), model) < 1e-5
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
    with caplog.at_level(logging.WARNING):
        assert fast_path(model) is None
    assert "it is not used" in caplog.text


@pytest.mark.skipif(not native_bfloat16(), reason="this CPU has no bfloat16 products: models are served in float32")
def test_the_recipes_model_takes_it_in_bfloat16() -> None:
    """Its activations on special tokens are so large there that both forwards give noise: not what it is tried on."""
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.bfloat16).eval()
    assert fast_path(model) is not None


def test_the_tiny_model_of_the_tests_takes_it(tiny_model: Path) -> None:
    assert fits(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
