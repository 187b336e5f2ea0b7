"""Servers and trainer ranks in one word."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.config.allocation import meaning
from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.render import render

ONE = {"tensor_parallel": 1, "context_parallel": 1}


@pytest.mark.parametrize(
    ("word", "nodes", "keys"),
    [
        (
            "sglang.d4t2+fsdp.d8",
            1,
            {
                "inference": {"engine": "sglang", "servers": 4, "tp": 2, "pp": 1, "ep": 1},
                "trainer": {"nproc": 8, **ONE},
            },
        ),
        (
            "vllm:d2p2e4 + fsdp[actor]:d8",
            2,
            {"inference": {"engine": "vllm", "servers": 2, "tp": 1, "pp": 2, "ep": 4}, "trainer": {"nproc": 4, **ONE}},
        ),
        ("embedded.d3", 1, {"inference": {"engine": "embedded", "servers": 3, "tp": 1, "pp": 1, "ep": 1}}),
        ("fsdp.d2p1", 1, {"trainer": {"nproc": 2, **ONE}}),
        ("fsdp.d8t2c2", 4, {"trainer": {"nproc": 8, "tensor_parallel": 2, "context_parallel": 2}}),
        (
            "fsdp:d4s2e4",
            1,
            {"trainer": {**ONE, "nproc": 8, "context_parallel": 2, "expert_parallel": 4}},
        ),
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


def test_it_takes_the_place_of_what_earlier_files_say(tmp_path: Path) -> None:
    """On a GPU the shipped recipe names its kind of server, and a user on the command line another one."""
    found = load_recipe("gsm8k_grpo", ["allocation=vllm.d2t2+fsdp.d2"], device="cuda")
    assert (found.inference.engine, found.inference.servers, found.inference.tp) == ("vllm", 2, 2)
    (tmp_path / "mine.yaml").write_text("trainer: {nproc: 4, tensor_parallel: 2, replicas: 2}\n")
    own = ["allocation=FSDP.d8", "rollout.batch_size=16"]
    found = load_recipe("arithmetic_grpo", own, str(tmp_path / "mine.yaml"))
    trainer = found.trainer
    assert (trainer.nproc, trainer.tensor_parallel, trainer.replicas) == (8, 1, 2), "replicas divide what d8 names"
    (tmp_path / "mine.yaml").write_text("allocation: fsdp.d2\ntrainer: {nproc: 4}\n")
    with pytest.raises(ConfigError, match=r"means trainer\.nproc=2, but it is set to 4"):
        load_recipe("arithmetic_grpo", [], str(tmp_path / "mine.yaml"))


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
        (["allocation=fsdp.d8", "trainer.tensor_parallel=2"], "means trainer.tensor_parallel=1, but it is set to 2"),
        (["inference.servers=2..8", "inference.max_servers=4"], "means inference.max_servers=8, but it is set to 4"),
    ],
)
def test_keys_that_say_otherwise_are_contradictions(settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_recipe("arithmetic_grpo", settings)


def test_a_range_that_contradicts_a_word_is_told_once() -> None:
    ray = ["inference.nodes=1", "launch.type=ray", "launch.device=cpu"]
    with pytest.raises(ConfigError) as told:
        load_recipe("arithmetic_grpo", ["allocation=embedded.d4", "inference.servers=2..8", *ray])
    assert str(told.value) == "allocation=embedded.d4 means inference.servers=4, but it is set to 2"
