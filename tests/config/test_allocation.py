"""Servers and trainer ranks in one word."""

from typing import Any

import pytest

from agentrl.config.allocation import meaning
from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.render import render


@pytest.mark.parametrize(
    ("word", "nodes", "keys"),
    [
        (
            "sglang.d4t2+fsdp.d8",
            1,
            {"inference": {"engine": "sglang", "servers": 4, "tp": 2, "pp": 1, "ep": 1}, "trainer": {"nproc": 8}},
        ),
        (
            "vllm:d2p2e4 + fsdp[actor]:d8",
            2,
            {"inference": {"engine": "vllm", "servers": 2, "tp": 1, "pp": 2, "ep": 4}, "trainer": {"nproc": 4}},
        ),
        ("embedded.d3", 1, {"inference": {"engine": "embedded", "servers": 3, "tp": 1, "pp": 1, "ep": 1}}),
        ("fsdp.d2p1", 1, {"trainer": {"nproc": 2}}),
        ("fsdp.d8t2c2", 4, {"trainer": {"nproc": 8, "tensor_parallel": 2, "context_parallel": 2}}),
        ("fsdp:d4s2e4", 1, {"trainer": {"nproc": 8, "context_parallel": 2, "expert_parallel": 4}}),
    ],
)
def test_a_word_means_keys(word: str, nodes: int, keys: dict[str, Any]) -> None:
    assert meaning(word, nodes) == keys


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("megatron.d8", "the trainer is FSDP2"),
        ("sglang.d4|fsdp.d4", "GPUs of their own"),
        ("sglang.d4+megatron:(attn:d4|ffn:e4)", "GPUs of their own"),
        ("fsdp.d4p2", "no pipeline stages"),
        ("fsdp.d4c2s2", "are the same here"),
        ("sglang.d4s2", "servers have no context ranks"),
        ("sglang.d4+vllm.d2", "names the inference twice"),
        ("fsdp.d4d2", "stands twice"),
        ("fsdp.x4", "x is not known"),
        ("fsdp.d0", "d0 is no size"),
        ("fsdp", "is not KIND.SIZES"),
        ("fsdp.4", "is not a list of sizes"),
        ("", "is not KIND.SIZES"),
    ],
)
def test_what_it_cannot_mean_is_refused_with_the_reason(word: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        meaning(word)


def test_it_is_a_recipes_key() -> None:
    given = load_recipe("arithmetic_grpo", ["allocation=embedded.d2+fsdp.d4", "trainer.nodes=2", "launch.head=h"])
    assert given.inference.servers == 2 and given.trainer.nproc == 2 and given.trainer.ranks == 4


def test_a_recipe_that_was_written_out_means_the_same(tmp_path: Any) -> None:
    given = load_recipe("arithmetic_grpo", ["allocation=sglang.d2t2+fsdp.d2"])
    (tmp_path / "again.yaml").write_text(render(given, comments=False))
    assert load_recipe(str(tmp_path / "again.yaml")) == given


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["allocation=embedded.d2", "inference.servers=3"], "means inference.servers=2, but it is set to 3"),
        (["allocation=fsdp.d3", "trainer.nodes=2", "launch.head=h"], "cannot be spread over trainer.nodes=2"),
        (["allocation=5"], "is not KIND.SIZES"),
    ],
)
def test_keys_that_say_otherwise_are_contradictions(settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_recipe("arithmetic_grpo", settings)
