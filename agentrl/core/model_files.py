"""Reads configs and tokenizers of models with transformers, and says in one line why one cannot be read.

Guarantees: code that comes with a model runs only where the caller says so: transformers never asks at the terminal.
Importing this needs neither torch nor transformers.
"""

import json
import pickle
import struct
from functools import cache
from pathlib import Path
from typing import Any

MOST = 200  # characters of an error that are repeated
_PLAIN = (
    OSError, ImportError, ArithmeticError, EOFError, TypeError, ValueError, RuntimeError, LookupError, AttributeError,
    AssertionError, struct.error, pickle.UnpicklingError,
)  # fmt: skip


class Unreadable(ValueError):
    """A model's files cannot be read; the message says why and what can be done."""


@cache
def unreadable() -> tuple[type[Exception], ...]:
    """Returns what transformers raises for files that are broken, or hold values that a class does not take."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return *_PLAIN, SafetensorError, StrictDataclassError


def one_line(error: Exception) -> str:
    """Returns the kind of an error and what it says, in one line."""
    said = " ".join(str(error).split("Model type should be one of")[0].split())
    return f"{type(error).__name__}: {said[:MOST]}" if said else type(error).__name__


def read_config(folder: Path, *, trust: bool = False) -> Any:
    """Reads a model's config.

    Args:
        folder: Folder of the model.
        trust: Whether code that comes with the model may run.

    Raises:
        Unreadable: transformers does not know the model, or its config holds what its class does not take.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust)
    except unreadable() as error:
        raise Unreadable(_wrong_config(folder, error, trust)) from error


def read_tokenizer(folder: Path, *, trust: bool = False) -> Any:
    """Reads a model's tokenizer; arguments as of :func:`read_config`.

    Raises:
        Unreadable: The folder has none, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust)
    except unreadable() as error:
        if (folder / "config.json").is_file():
            read_config(folder, trust=trust)  # which may be the reason
        brings = "AutoTokenizer" in (read_object(folder / "tokenizer_config.json").get("auto_map") or {})
        remedy = TRUST if brings and not trust else COPY
        raise Unreadable(f"the tokenizer in {folder} cannot be loaded ({one_line(error)}): {remedy}") from error


TRUST = "set model.trust_remote_code=true to run the code that comes with it, if you trust it"
COPY = "copy the model's own tokenizer.json and tokenizer_config.json into the folder"


def _wrong_config(folder: Path, error: Exception, trust: bool) -> str:
    """Says what is wrong with a config that transformers does not read, and what can be done."""
    from transformers import CONFIG_MAPPING, __version__

    config = read_object(folder / "config.json")
    kind = config.get("model_type")
    if "auto_map" in config and not trust:
        return f"transformers {__version__} does not know the model type {kind!r}, whose code comes with it: {TRUST}"
    if kind is None:
        return f"the config.json in {folder} names no model_type: take the model's own config.json"
    if kind in CONFIG_MAPPING or "auto_map" in config:
        remedy = "take the model's own config.json, or the version of transformers that it was made for"
        return f"the config.json in {folder} cannot be used by transformers {__version__} ({one_line(error)}): {remedy}"
    remedy = "install a newer transformers, or take another model"
    return f"transformers {__version__} does not know the model type {kind!r} ({one_line(error)}): {remedy}"


def end_ids(value: Any, of: str) -> list[int]:
    """Returns the ids of the tokens that end an answer.

    Args:
        value: ``eos_token_id`` of a config: an id, several, or ``None``.
        of: The file that holds it.

    Raises:
        Unreadable: It is none of these.
    """
    found = [] if value is None else value if isinstance(value, list) else [value]
    if all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found):
        return found
    raise Unreadable(f"eos_token_id of {of} is {value!r}, neither a token's id nor a list of ids: take the model's own")


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
