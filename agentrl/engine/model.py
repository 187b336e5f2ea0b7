"""Loads a model for generation from a folder in Hugging Face's format.

Guarantees: how the model's past is kept is found by trying it (:mod:`agentrl.engine.cache_support`): in shared slots
where every layer attends to the whole past, in transformers' own caches, or not at all. A model whose tokens depend on
later ones is refused. End tokens come from the generation config, the config and the tokenizer together.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agentrl.core.model_files import Unreadable, end_ids, one_line, read_config, read_tokenizer
from agentrl.engine.cache_support import Past, find_past
from agentrl.host.compute_dtype import resolved_dtype
from agentrl.models.auto_class import auto_class
from agentrl.models.folder_check import refused_folder
from agentrl.models.loading import load_weights
from agentrl.models.pixels import Pixels, keep_pixels, pixels_of
from agentrl.models.probe import FAULTS

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
        layers: Number of layers.
        past: How the past of a request is kept: in shared ``slots``, in ``caches`` of transformers' own, or
            ``recomputed`` at each step.
        why: Why the past is not kept in slots; empty if it is.
    """

    path: str
    model: Any
    tokenizer: Any
    context_length: int
    eos_ids: frozenset[int]
    vocab_size: int
    layers: int
    past: Past = "slots"
    why: str = ""

    @property
    def dtype(self) -> str:
        """Name of the parameters' dtype."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.parameters()).device

    @property
    def pixels(self) -> Pixels | None:
        """What makes the arguments of the model for images; ``None`` if it takes none."""
        return pixels_of(self.model)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Chooses the dtype for ``auto``, ``float32``, ``float16`` or ``bfloat16`` on a device."""
    return DTYPES[resolved_dtype(name, device.type)]


def pick_device(name: str) -> torch.device:
    """Chooses the device for ``auto`` (CUDA if there is one) or a torch device name."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    path: str, dtype: str = "auto", device: str = "auto", context_length: int | None = None, *, trust: bool = False
) -> LoadedModel:
    """Load model and tokenizer from a local folder.

    Args:
        path: Folder in Hugging Face's format.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` or a torch device name.
        context_length: Most tokens of prompt and output; ``None`` takes the model's maximum.
        trust: Whether code that comes with the model may run.

    Returns:
        The loaded model.

    Raises:
        ModelError: If the model cannot be served.
    """
    loaded = load_without_tokenizer(path, dtype, device, context_length, trust=trust)
    try:
        tokenizer = read_tokenizer(Path(path), trust=trust)
    except Unreadable as error:
        raise ModelError(str(error)) from error
    ends = loaded.eos_ids if tokenizer.eos_token_id is None else loaded.eos_ids | {tokenizer.eos_token_id}
    return replace(loaded, tokenizer=tokenizer, eos_ids=ends)


def load_without_tokenizer(
    path: str, dtype: str, device: str, context_length: int | None, *, trust: bool = False
) -> LoadedModel:
    """Loads a model alone, for tests of it; arguments and errors are those of :func:`load_model`."""
    if why := refused_folder(Path(path)):
        raise ModelError(why)
    target = pick_device(device)
    model = _loaded(path, pick_dtype(dtype, target), trust)
    model.eval().requires_grad_(False).to(target)
    config = model.config.get_text_config(decoder=True)
    context = _context_length(config, context_length)
    try:
        past, why = find_past(model, context)
    except FAULTS as error:
        why = f"{config.model_type} cannot compute a sequence ({one_line(error)})"
        raise ModelError(f"{why}: compare config.json with the model's own") from error
    if past is None:
        raise ModelError(
            f"{config.model_type} cannot be served by the embedded engine: {why}; serve it with SGLang or vLLM"
        )
    return LoadedModel(
        path=str(path),
        model=model,
        tokenizer=None,
        context_length=context,
        eos_ids=_eos_ids(model, config),
        vocab_size=model.get_input_embeddings().num_embeddings,
        layers=config.num_hidden_layers,
        past=past,
        why=why,
    )


def _loaded(path: str, dtype: torch.dtype, trust: bool) -> Any:
    """Loads the weights."""
    folder = Path(path)
    try:
        config = read_config(folder, trust=trust)
        model = load_weights(auto_class(config), folder, config, trust=trust, dtype=dtype)
    except Unreadable as error:
        raise ModelError(str(error)) from error
    keep_pixels(model, folder, trust=trust)
    return model


def _context_length(config: Any, asked: int | None) -> int:
    """Returns the context length to serve, at most the model's maximum."""
    known = max(getattr(config, "max_position_embeddings", None) or 0, 0)  # some classes say -1 for any length
    if asked is None:
        return known or DEFAULT_CONTEXT
    if known and asked > known:
        raise ModelError(f"--context-length {asked} is above the model's max_position_embeddings {known}")
    return asked


def _eos_ids(model: Any, config: Any) -> frozenset[int]:
    """Collects the end tokens from generation config and config.

    Raises:
        ModelError: One of them holds no ids.
    """
    sources = {"generation_config.json": getattr(model, "generation_config", None), "config.json": config}
    try:
        found = [end_ids(getattr(source, "eos_token_id", None), name) for name, source in sources.items()]
    except Unreadable as error:
        raise ModelError(str(error)) from error
    return frozenset(one for ids in found for one in ids)
