"""What an adapter, a compiled layer or parameters in the host's memory cannot be combined with."""

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe

RANK = "trainer.lora_rank=8"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["trainer.lora_alpha=16"], ["trainer.lora_alpha", "trainer.lora_rank"]),
        (["trainer.lora_push=adapter"], ["trainer.lora_push", "trainer.lora_rank"]),
        ([RANK, "trainer.kl_coef=0.1", "trainer.reference=ema"], ["trainer.reference=ema", "trainer.lora_rank"]),
        (
            [RANK, "trainer.lora_push=adapter", "weights.transport=broadcast"],
            ["trainer.lora_push", "weights.transport"],
        ),
        (["trainer.cpu_offload=true"], ["trainer.cpu_offload", "launch.device"]),
    ],
)
def test_contradictions_are_refused_with_both_keys(settings: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("arithmetic_grpo", settings, device="cpu")
    assert all(key in str(caught.value) for key in named), str(caught.value)


@pytest.mark.parametrize("setting", [RANK, "trainer.compile=true", "trainer.cpu_offload=true"])
def test_trainers_that_learn_from_lines_have_none_of_it(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting.split('=')[0]} does nothing with trainer.type=sft"):
        load_recipe("gsm8k_sft", [setting], device="cuda")


def test_a_gpu_may_have_all_of_it() -> None:
    recipe = load_recipe("gsm8k_grpo", [RANK, "trainer.compile=true", "trainer.cpu_offload=true"], device="cuda")
    assert (recipe.trainer.lora_rank, recipe.trainer.lora_push) == (8, "merged")
