"""Finds the tokenizer of a run on this machine, after the run as well.

Guarantees: nothing is fetched; where there is none, the reason is said.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.core.model_files import Unreadable, read_tokenizer
from agentrl.host.cache_folder import cache_folder


def local_tokenizer(folder: Path, config: Mapping[str, Any]) -> tuple[Any | None, str]:
    """Loads a run's tokenizer.

    Args:
        folder: Folder of the run.
        config: Resolved recipe of the run.

    Returns:
        The tokenizer, or ``None``, and where it is from, or why there is none.
    """
    place, looked = _tokenizer_folder(folder, config)
    if place is None:
        return None, f"no tokenizer on this machine ({looked})"
    try:
        return read_tokenizer(place), f"tokenizer of {place}"
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except Unreadable as error:
        return None, str(error)


def _tokenizer_folder(folder: Path, config: Mapping[str, Any]) -> tuple[Path | None, str]:
    """Looks in the run's folder, then for the recipe's model among what is on this machine."""
    name = (config.get("model") or {}).get("name")
    places = [folder / "model", *sorted(folder.glob("checkpoints/*/model"))]
    if name:
        places.append(Path(name).expanduser())
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place, ""
    if not name:
        return None, "the run's folder has no model/, and its config.json names none"
    found = _on_this_machine(name)
    return found, f"looked in {folder / 'model'} and for {name}"


def _on_this_machine(name: str) -> Path | None:
    """Finds the folder of a model that was resolved before: in Hugging Face's cache or in ours."""
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer.json") if name.count("/") <= 1 else None
    except (ImportError, ValueError):
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    ours = cache_folder() / "models"
    begin = name.replace("/", "-")
    found = sorted(ours.glob(f"{begin}*/tokenizer.json")) if ours.is_dir() else []
    return found[-1].parent if found else None
