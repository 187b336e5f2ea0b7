"""A model that training refuses is refused from a small model of its config, and one that it takes is not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    BertConfig,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    T5Config,
)

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.host import entry
from agentrl.launch.resolve import resolve
from agentrl.models.folder_check import PLAIN, is_plain
from agentrl.train.model_check import check_model
from agentrl.train.policy import ModelRefused
from tests.train.noisy_models import CONFIGS

ROOT = Path(__file__).parents[2]
LARGE: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
TAKEN: dict[str, PreTrainedConfig] = {
    **CONFIGS,
    "a Llama of 8 billion": LlamaConfig(**LARGE, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256),
    "qwen2": Qwen2Config(**LARGE, num_key_value_heads=4),
    "smollm3": SmolLM3Config(),
    "experts": Qwen3MoeConfig(),
    "linear attention": Qwen3NextConfig(),
    "windows": MistralConfig(**LARGE, sliding_window=100),
    "state space": MambaConfig(),
    "alibi": FalconConfig(hidden_size=1024, num_attention_heads=16, alibi=True),
    "no attention of ours": BloomConfig(hidden_size=1024, n_layer=24, n_head=16),
    "scaled logits": CohereConfig(**LARGE),
    "soft caps": Gemma2Config(sliding_window=4096),
    "images, and windows": Gemma3Config(),
    "images alone": Qwen2VLConfig(
        text_config={
            "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        }
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "encoder-decoder": (T5Config(), "'t5' is an encoder-decoder"),
    "quantised": (
        LlamaConfig(**LARGE, quantization_config={"quant_method": "gptq", "bits": 4}),
        r"quantised \(gptq\).*dequantize",
    ),
    "not causal": (BertConfig(), "tokens of one sequence depend on another after it"),
}


def recipe_of(*more: str) -> Recipe:
    return resolve(load_recipe("arithmetic_grpo", ["inference.context_length=512", *more], device="cpu"), None)


def folder_of(config: PreTrainedConfig, folder: Path) -> Path:
    """Writes a config alone: no weights are needed."""
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TAKEN)
def test_what_training_takes_is_taken(name: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    """In float32 on every machine: transformers' own code for Mamba mixes dtypes in bfloat16 without its kernels."""
    assert check_model(recipe_of("trainer.dtype=float32"), folder_of(TAKEN[name], tmp_path)) is None


def test_code_that_mixes_dtypes_in_bfloat16_is_refused_with_the_way_out(tmp_path: Path, mesh: DeviceMesh) -> None:
    with pytest.raises(ModelRefused, match=r"dtype.*trainer\.dtype=float32 inference\.dtype=float32$"):
        check_model(recipe_of("trainer.dtype=bfloat16"), folder_of(MambaConfig(), tmp_path))


@pytest.mark.parametrize("attention", ["auto", "packed", "padded"])
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_what_is_left_unchecked_is_always_taken(name: str, attention: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    config = AutoConfig.for_model(name, **LARGE, num_key_value_heads=8)
    folder = folder_of(config, tmp_path)
    assert is_plain(json.loads((folder / "config.json").read_text()))
    for dtype in ("float32", "bfloat16"):
        check_model(recipe_of(f"trainer.attention={attention}", f"trainer.dtype={dtype}"), folder)


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False}, True),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, False),
        ({"model_type": "llama", "sliding_window": 9}, False),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"model_type": "gpt2"}, False),
    ],
)
def test_only_plain_models_are_left_unchecked(config: dict[str, Any], plain: bool) -> None:
    assert is_plain(config) == plain


@pytest.mark.parametrize("name", REFUSED)
def test_what_training_refuses_is_refused(name: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ModelRefused, match=message):
        check_model(recipe_of(), folder_of(config, tmp_path))


@pytest.mark.parametrize("setting", ["trainer.attention=packed", "trainer.lora_targets=[nowhere]"])
def test_what_a_setting_needs_and_the_model_lacks_is_refused(setting: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    chosen = [setting, "trainer.lora_rank=2"] if "lora" in setting else [setting]
    with pytest.raises(ModelRefused, match="trainer.attention=padded" if "packed" in setting else "lora_targets"):
        check_model(recipe_of(*chosen), folder_of(CONFIGS["gpt2"], tmp_path))


def test_packed_rows_of_a_model_without_them_are_refused_with_the_reason(tmp_path: Path, mesh: DeviceMesh) -> None:
    with pytest.raises(ModelRefused, match=r"linear_attention layers.*trainer\.attention=padded"):
        check_model(recipe_of("trainer.attention=packed"), folder_of(MambaConfig(), tmp_path))


@pytest.mark.parametrize(
    "settings", [["trainer.preset=ppo"], ["trainer.dtype=bfloat16", "trainer.compile=true"], ["trainer.lora_rank=4"]]
)
def test_other_settings_are_tried_too(settings: list[str], tmp_path: Path, mesh: DeviceMesh) -> None:
    assert check_model(recipe_of(*settings), folder_of(TAKEN["qwen2"], tmp_path)) is None


@pytest.mark.parametrize(
    ("name", "code", "said"), [("qwen3", 0, "can be trained"), ("gpt2", entry.REFUSED, "refused: GPT2LM")]
)
def test_the_process_says_so_in_one_line(name: str, code: int, said: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    recipe = recipe_of("trainer.attention=packed")
    (run_dir / "config.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    model = folder_of(CONFIGS[name], tmp_path / "model")
    command = [sys.executable, "-m", "agentrl.train.model_check", "--run-dir", str(run_dir), "--model", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert done.returncode == code and said in lines[-1], lines
    assert len([line for line in lines if "Traceback" in line]) == 0
