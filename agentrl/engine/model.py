"""Loads a model for generation from a folder in Hugging Face's format.

Guarantees: only models are accepted in which every layer attends to the whole past (a sliding window is accepted if it
is not shorter than the context); others are refused by name, because their cache would be wrong without an error. End
tokens come from the generation config, the config and the tokenizer together.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.host.compute_dtype import resolved_dtype
from agentrl.models.tree_support import limited_attention, not_for_trees

DEFAULT_CONTEXT = 4096  # for a config without a maximum
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(RuntimeError):
    """The model cannot be served; the message says why."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        path: Folder of the model.
        model: A transformers causal language model, in eval mode, on its device.
        tokenizer: The model's tokenizer.
        context_length: Most tokens of prompt and output together.
        eos_ids: All end tokens.
        vocab_size: Number of rows of the embedding; ids must be below.
        layers: Number of attention layers.
    """

    path: str
    model: Any
    tokenizer: Any
    context_length: int
    eos_ids: frozenset[int]
    vocab_size: int
    layers: int

    @property
    def dtype(self) -> str:
        """Name of the parameters' dtype."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.parameters()).device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Chooses the dtype for ``auto``, ``float32``, ``float16`` or ``bfloat16`` on a device."""
    return DTYPES[resolved_dtype(name, device.type)]


def pick_device(name: str) -> torch.device:
    """Chooses the device for ``auto`` (CUDA if there is one) or a torch device name."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(path: str, dtype: str = "auto", device: str = "auto", context_length: int | None = None) -> LoadedModel:
    """Load model and tokenizer from a local folder.

    Args:
        path: Folder in Hugging Face's format.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` or a torch device name.
        context_length: Most tokens of prompt and output; ``None`` takes the model's maximum.

    Returns:
        The loaded model.

    Raises:
        ModelError: If the model cannot be served.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not Path(path, "config.json").is_file():
        raise ModelError(f"{path} is no model folder: it has no config.json")
    target = pick_device(device)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=pick_dtype(dtype, target), attn_implementation="sdpa", local_files_only=True
    )
    model.eval().requires_grad_(False).to(target)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    config = model.config.get_text_config()
    context = _context_length(config, context_length)
    _check_attention(model, context)
    return LoadedModel(
        path=str(path),
        model=model,
        tokenizer=tokenizer,
        context_length=context,
        eos_ids=_eos_ids(model, config, tokenizer),
        vocab_size=model.get_input_embeddings().num_embeddings,
        layers=config.num_hidden_layers,
    )


def _context_length(config: Any, asked: int | None) -> int:
    """Returns the context length to serve, at most the model's maximum."""
    known = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return known or DEFAULT_CONTEXT
    if known and asked > known:
        raise ModelError(f"--context-length {asked} is above the model's max_position_embeddings {known}")
    return asked


def _check_attention(model: Any, context: int) -> None:
    """Refuse models with layers that need another kind of cache, or that cannot compute packed prompts."""
    config = model.config.get_text_config()
    others = limited_attention(config, context)
    if others:
        window = getattr(config, "sliding_window", None)
        hint = f"; start with --context-length {window} or less" if others == ["sliding_attention"] and window else ""
        raise ModelError(f"{config.model_type} has {', '.join(others)} layers, which the embedded engine lacks{hint}")
    if why := not_for_trees(model):
        raise ModelError(f"{config.model_type} cannot be served by the embedded engine: {why}")


def _eos_ids(model: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Collects the end tokens from generation config, config and tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for source in (getattr(generation, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        found.update([source] if isinstance(source, int) else source or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
