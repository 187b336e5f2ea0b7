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
SINGLE = ("model.safetensors", "pytorch_model.bin")  # files of transformers, in the order in which it looks
ADAPTER = "adapter_config.json"  # of PEFT
LFS = b"version https://git-lfs.github.com/spec"
QUANTISED = ("quantization_config", "compression_config")  # keys of a config, or of one of its parts
AGAIN = "download the model again"
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
        return f"{folder} is no model folder: {_instead(folder) or 'it has no config.json: download the whole model'}"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{file} is no JSON ({error}): {AGAIN}"
    if not isinstance(config, dict):
        return f"{file} holds no JSON object: {AGAIN}"
    if why := refused_config(config):
        return why
    return _wrong_files(folder) if weights else None


def refused_config(config: Mapping[str, Any]) -> str | None:
    """Returns why a model with this ``config.json`` can be neither trained nor served; ``None`` if it may be."""
    if config.get("is_encoder_decoder"):
        return (
            f"a {config.get('model_type')!r} is an encoder-decoder, and agentrl trains and serves decoders: take a "
            "causal language model"
        )
    parts = [config, *(one for one in config.values() if isinstance(one, Mapping))]
    quantised = next((part[key] for part in parts for key in QUANTISED if part.get(key)), None)
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


def _wrong_files(folder: Path) -> str | None:
    """Returns which of the weight files that transformers reads is missing or broken."""
    whole = any((folder / f"{name}{more}").is_file() for name in SINGLE for more in ("", ".index.json"))
    if ((folder / ADAPTER).is_file() or not whole) and (why := _instead(folder)):
        return f"{folder} is no model by itself: {why}"
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        return f"{folder} has a config.json and no weights ({' or '.join(WEIGHTS)}): copy or download them"
    if (folder / SINGLE[0]).is_file():
        return _broken(folder / SINGLE[0])
    indices = [folder / f"{name}.index.json" for name in SINGLE if (folder / f"{name}.index.json").is_file()]
    if not indices:
        if (folder / SINGLE[1]).is_file():
            return _broken(folder / SINGLE[1])
        return f"{folder} has neither {SINGLE[0]} nor {SINGLE[0]}.index.json, which names its files: {AGAIN}"
    try:
        named = set(json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{indices[0]} is no index of weights ({type(error).__name__}): {AGAIN}"
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return f"{folder} lacks {shown}, which {indices[0].name} names: {AGAIN}"
    return next(filter(None, (_broken(folder / name) for name in sorted(named))), None)


def _instead(folder: Path) -> str | None:
    """Returns what a folder holds in the place of a model, and what can be done; ``None`` if it is not known."""
    if (folder / ADAPTER).is_file():  # which transformers would load too
        try:
            base = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (ValueError, AttributeError):
            base = None
        return (
            f"it holds an adapter (LoRA){f' of {base}' if base else ''}: merge it into its model (merge_and_unload() "
            "of PEFT), and save that with its tokenizer"
        )
    if next(folder.glob("*.gguf"), None):
        return "its weights are a GGUF, which cannot be trained: take the model's own weights, in safetensors"
    return None


def _packed(name: str, dtype: str) -> bool:
    """Whether a tensor of a safetensors file is a weight that only its scales make a number."""
    return dtype.startswith(("F8", "F6", "F4")) or (dtype in ("I8", "U8") and "weight" in name.rpartition(".")[2])


def _broken(file: Path) -> str | None:
    """Returns what is wrong with a weight file, from its first bytes and its size."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(8)
        if len(head) == 8 and LFS.startswith(head):
            return f"{file} is the pointer of Git LFS, not the file: run git lfs pull in its repository"
        if file.suffix != ".safetensors":
            return None if size else f"{file} is empty: {AGAIN}"
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            return f"{file} is cut, or no safetensors file: {AGAIN}"
        try:
            parts = {name: part for name, part in json.loads(opened.read(length)).items() if name != "__metadata__"}
            wanted = 8 + length + max((part["data_offsets"][1] for part in parts.values()), default=0)
            packed = next((name for name, part in parts.items() if _packed(name, part["dtype"])), None)
        except (ValueError, LookupError, TypeError, AttributeError):
            return f"{file} is no safetensors file: {AGAIN}"
    if size != wanted:
        return f"{file} has {size} bytes of {wanted}: {AGAIN}"
    if packed is None:
        return None
    return (
        f"its weights are quantised ({parts[packed]['dtype']}, e.g. {packed}), which its config.json does not say, so "
        f"they cannot be trained or replaced: {UNQUANTISED}"
    )
