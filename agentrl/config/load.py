"""Loads a recipe's name, a file and ``key=value`` arguments into one validated :class:`~agentrl.config.recipe.Recipe`.

Guarantees: the order is fixed (recipe file, its ``on_cpu`` or ``on_gpu`` part, ``--config`` file, overrides; later
wins); every problem that can be seen is told at once, in one :class:`~agentrl.config.errors.ConfigError`;
``launch.device`` of the result is ``cpu`` or ``cuda``, never ``auto``. Keys of the device part that is not used are
checked too.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.device import Device, detect_device
from agentrl.config.errors import ConfigError
from agentrl.config.keys import dotted_keys, unknown_keys
from agentrl.config.overrides import describe, merge, parse_override, read_file, set_key
from agentrl.config.problems import problems
from agentrl.config.recipe import Recipe
from agentrl.core.registry import nearest

__all__ = ["ConfigError", "detect_device", "dotted_keys", "find_recipe", "load_recipe", "recipe_names", "recipe_of_run"]

_SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
_NAMES = ("env.id", "agent.id", "workflow.id", "train_dataset.name", "valid_dataset.name")  # each beside its kwargs
_PARTS: dict[Device, str] = {"cpu": "on_cpu", "cuda": "on_gpu"}


def recipe_folders() -> list[Path]:
    """Folders that are searched for a recipe's name: ``recipes`` of the working folder, then the shipped ones."""
    return [Path("recipes"), _SHIPPED]


def recipe_names() -> list[str]:
    """Names of all recipes that can be found, sorted."""
    return sorted({file.stem for folder in recipe_folders() for file in folder.glob("*.yaml")})


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe.

    Raises:
        ConfigError: There is none; the message names the nearest and the places looked in.
    """
    if name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"no recipe file {path} (looked in {path.resolve().parent})")
        return path
    for folder in recipe_folders():
        if (folder / f"{name_or_path}.yaml").is_file():
            return folder / f"{name_or_path}.yaml"
    names = recipe_names()
    looked = " and ".join(dict.fromkeys(str(folder.resolve()) for folder in recipe_folders()))
    raise ConfigError(
        f"no recipe {name_or_path!r}{nearest(name_or_path, names) or '.'} Known: {', '.join(names)}. "
        f"Looked in {looked}; a path to a .yaml file works too"
    )


def load_recipe(
    name_or_path: str | None,
    overrides: Sequence[str] = (),
    config_file: str | None = None,
    device: Device | None = None,
) -> Recipe:
    """Build the recipe of a run.

    Args:
        name_or_path: A recipe's name or a YAML file; ``None`` when ``config_file`` holds everything.
        overrides: ``a.b=value`` texts; the value is YAML.
        config_file: A YAML file merged over the recipe.
        device: Choose the device part; by default ``launch.device``, and where that is ``auto`` what the machine has.

    Raises:
        ConfigError: With every problem found.
    """
    if name_or_path is None and config_file is None:
        raise ConfigError(f"name a recipe ({', '.join(recipe_names())}) or give --config FILE")
    files = [find_recipe(name_or_path)] if name_or_path is not None else []
    if config_file is not None:
        files.append(Path(config_file).expanduser())
    wrong: list[str] = []
    layers = [_read_layer(path, wrong) for path in files]
    settings: list[tuple[str, Any]] = []
    for text in overrides:
        try:
            settings.append(parse_override(text))
        except ConfigError as error:
            wrong.append(str(error))
    device = device or _wanted_device(layers, settings) or detect_device()
    data: dict[str, Any] = {"name": files[0].stem}
    for base, parts in layers:
        for part in (base, parts.get(_PARTS[device], {})):
            data = merge(without_foreign_kwargs(data, part), part)
    chosen: dict[str, Any] = {}
    for key, value in settings:
        if key in _NAMES:
            chosen = set_key(chosen, key, value)
    data = without_foreign_kwargs(data, chosen)
    for key, value in settings:
        data = set_key(data, key, value)
    launch = data.get("launch") or {}
    if isinstance(launch, Mapping) and launch.get("device", "auto") == "auto":
        data = set_key(data, "launch.device", device)
    return validate(data, wrong)


def recipe_of_run(run_dir: Path) -> Recipe:
    """The resolved recipe of a run, as its processes read it."""
    return Recipe.model_validate_json((run_dir / "config.json").read_text())


def without_foreign_kwargs(data: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` without the arguments of components that ``layer`` replaces by others: they were meant for the old ones.

    Args:
        data: The settings so far.
        layer: The settings to merge over them.
    """
    result = dict(data)
    for name in _NAMES:
        section, key = name.split(".")
        old, new = data.get(section), layer.get(section)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and key in new and new[key] != old.get(key):
            result[section] = {k: v for k, v in old.items() if k != "kwargs"}
    return result


def validate(data: Mapping[str, Any], wrong: Sequence[str] = ()) -> Recipe:
    """Nested plain data as a recipe.

    Args:
        data: Parsed YAML.
        wrong: Problems found already, told together with those found here.

    Raises:
        ConfigError: With every problem.
    """
    found = list(wrong)
    try:
        # Strict JSON: true is no number and "5" no whole number, while a list may fill a tuple.
        recipe = Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        found += [problem for problem in problems(error) if not any(problem in known for known in found)]
    except TypeError as error:
        found.append(f"a value is not plain data: {error}")
    else:
        if not found:
            return recipe
    raise ConfigError("\n".join(found))


def _read_layer(path: Path, wrong: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A file as its keys and its device parts; unknown keys go to ``wrong`` with the file's name, and out."""
    base = read_file(path)
    parts: dict[str, dict[str, Any]] = {}
    for name in _PARTS.values():
        part = base.pop(name, None) or {}
        if not isinstance(part, dict):
            wrong.append(f"{path}: {name} was {describe(part)}, but must be a mapping of recipe keys")
            continue
        wrong += [f"{path}: {name}: {text}" for text in unknown_keys(part)]
        parts[name] = part
    wrong += [f"{path}: {text}" for text in unknown_keys(base)]
    return base, parts


def _wanted_device(
    layers: Sequence[tuple[Mapping[str, Any], Any]], settings: Sequence[tuple[str, Any]]
) -> Device | None:
    """``launch.device`` as the last layer or override sets it; ``None`` where they leave it open."""
    wanted: Any = "auto"
    for base, _ in layers:
        launch = base.get("launch")
        if isinstance(launch, Mapping):
            wanted = launch.get("device", wanted)
    for key, value in settings:
        if key == "launch.device":
            wanted = value
        elif key == "launch" and isinstance(value, Mapping):
            wanted = value.get("device", wanted)
    return wanted if wanted in ("cpu", "cuda") else None  # anything else is validation's to refuse
