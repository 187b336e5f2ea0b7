"""Tells what in a model folder prevents its use, from its JSON files alone.

Guarantees: no weights are read and torch is not imported. A refusal names what is wrong and what can be done.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLAIN = frozenset({"llama", "qwen2", "qwen3"})
"""Model types whose models with full attention in all layers can be trained; held to it by tests."""

WEIGHTS = ("*.safetensors", "*.bin")
RESIZE = "resize the embedding (model.resize_token_embeddings) and save the model, or take its own tokenizer"
UNQUANTISED = "train and serve the original weights, or convert them (dequantize() of transformers) and save the result"


def refused_folder(folder: Path, *, weights: bool = True) -> str | None:
    """Returns why a folder's model can be neither trained nor served by the embedded engine; ``None`` if it may be.

    Args:
        folder: Model folder in Hugging Face's format.
        weights: Whether its weights are needed too.
    """
    file = folder / "config.json"
    if not file.is_file():
        return f"{folder} is no model folder: it has no config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{file} is no JSON: {error}"
    if not isinstance(config, dict):
        return f"{file} holds no object"
    if why := refused_config(config):
        return why
    if weights and not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        return f"{folder} has a config.json and no weights ({' or '.join(WEIGHTS)}): copy or download them"
    return _missing_shards(folder) if weights else None


def refused_config(config: Mapping[str, Any]) -> str | None:
    """Returns why a model with this ``config.json`` can be neither trained nor served; ``None`` if it may be."""
    if config.get("is_encoder_decoder"):
        return (
            f"a {config.get('model_type')!r} is an encoder-decoder: agentrl trains and serves decoders; take a causal "
            "language model"
        )
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        return f"its weights are quantised ({method}), so they cannot be trained or replaced: {UNQUANTISED}"
    return None


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether a model's config is that of a family that can be trained, with full attention in all layers."""
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    full = set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
    return config.get("model_type") in PLAIN and full and not window


def embedding_rows(folder: Path) -> int | None:
    """Returns how many ids a folder's model knows, from its config; ``None`` if that does not tell."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    parts = [config, *(config.get(name) for name in ("text_config", "language_config", "llm_config"))]
    found = [part["vocab_size"] for part in parts if isinstance(part, dict) and isinstance(part.get("vocab_size"), int)]
    return found[-1] if found else None


def tokens_without_row(tokenizer: Any, rows: int) -> tuple[list[str], list[str]]:
    """Returns the tokens whose ids are beyond the embedding: those of ordinary text, and special ones.

    Text models of a family with images keep its special tokens in their tokenizer, which no text is encoded to.

    Args:
        tokenizer: Tokenizer of the model.
        rows: Number of ids that the model knows.
    """
    beyond = {one: name for name, one in tokenizer.get_vocab().items() if one >= rows}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {one for one in beyond if one in added and added[one].special}
    return [beyond[one] for one in sorted(beyond.keys() - special)], [beyond[one] for one in sorted(special)]


def too_many_tokens(ordinary: list[str], rows: int) -> str:
    """Says that a tokenizer has ids that the embedding lacks, and what can be done."""
    return (
        f"the tokenizer has {len(ordinary)} tokens (e.g. {ordinary[0]!r}) beyond the {rows} rows of the model's "
        f"embedding: {RESIZE}"
    )


def unknown_config(folder: Path, error: Exception) -> str:
    """Says that transformers does not know a config, and what can be done."""
    from transformers import __version__

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if "auto_map" in config:
        remedy = "set model.trust_remote_code=true to run the code that comes with it, if you trust it"
    else:
        remedy = "install a newer transformers, or take another model"
    return f"transformers {__version__} does not know the model type {kind!r} ({_first_line(error)}): {remedy}"


def _missing_shards(folder: Path) -> str | None:
    """Returns which files an index names and the folder lacks."""
    for index in sorted(folder.glob("*.index.json")):
        named = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            return f"{folder} lacks {shown}, which {index.name} names: download the model again"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
