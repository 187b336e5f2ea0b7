"""Sizes of well-known models, copied from the ``config.json`` that their makers publish.

Guarantees: a local folder goes before this table, so that a changed model is planned as it is; only a model that is not
here is looked for in the Hugging Face cache and on the hub.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError


def _config(
    kind: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, longest: int, *,
    tied: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    sizes = {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab}
    return sizes | {"tie_word_embeddings": tied, "max_position_embeddings": longest} | more


_EXPERTS: dict[str, Any] = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _config("llama", 576, 30, 9, 3, 1536, 49152, 8192, tied=True),
    "Qwen/Qwen2.5-0.5B-Instruct": _config("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-1.5B-Instruct": _config("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _config("qwen2", 3584, 28, 28, 4, 18944, 152064, 32768),
    "Qwen/Qwen2.5-32B-Instruct": _config("qwen2", 5120, 64, 40, 8, 27648, 152064, 32768),
    "Qwen/Qwen3-0.6B": _config("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, tied=True, head_dim=128),
    "Qwen/Qwen3-4B": _config("qwen3", 2560, 36, 32, 8, 9728, 151936, 40960, tied=True, head_dim=128),
    "Qwen/Qwen3-8B": _config("qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-32B": _config("qwen3", 5120, 64, 64, 8, 25600, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-30B-A3B": _config(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, 40960, moe_intermediate_size=768, **_EXPERTS
    ),
    "Qwen/Qwen3-235B-A22B": _config(
        "qwen3_moe", 4096, 94, 64, 4, 12288, 151936, 40960, moe_intermediate_size=1536, **_EXPERTS
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _config("llama", 4096, 32, 32, 8, 14336, 128256, 131072),
    "meta-llama/Llama-3.3-70B-Instruct": _config("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
}


def config_of(name: str) -> tuple[Mapping[str, Any], str]:
    """Finds a model's ``config.json``, without its weights.

    Returns:
        The config, and a sentence about its source.

    Raises:
        ConfigError: No place has it.
    """
    local = Path(name).expanduser() / "config.json"
    if local.is_file():
        return json.loads(local.read_text(encoding="utf-8")), f"{name}: local folder"
    if name in PUBLISHED:
        return PUBLISHED[name], f"{name}: sizes as published"
    from agentrl.data.models import find_config
    from agentrl.launch.needed_packages import require_packages

    require_packages({"huggingface_hub": f"the config.json of {name}"})
    config, source = find_config(name)
    if config is None:
        raise ConfigError(
            f"{source}. A plan needs its config.json: put that file alone into a folder and set model.name=FOLDER, or "
            f"plan with a model of nearly its size: {', '.join(PUBLISHED)}"
        )
    return config, source
