"""Loads a recipe file, a config file and ``key=value`` overrides into a :class:`~agentrl.config.recipe.Recipe`.

Guarantees: the order is fixed (recipe file, its ``on_cpu`` or ``on_gpu`` part, ``--config`` file, overrides; later
values win); all problems are reported at once, in one :class:`~agentrl.config.errors.ConfigError`; ``launch.device`` of
the result is ``cpu`` or ``cuda``, never ``auto``, and for machines that a scheduler chooses ``auto`` is refused where
this one has no GPU. Keys of the unused device part are checked too. An evaluation
(``trainer.type=null``) measures the same on every device, see :mod:`agentrl.config.device_parts`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.allocation import expanded, replaced, with_range
from agentrl.config.device import Device, detect_device
from agentrl.config.device_parts import PARTS, parts_of
from agentrl.config.errors import ConfigError
from agentrl.config.keys import dotted_keys, unknown_keys
from agentrl.config.machines import OWN_RAY
from agentrl.config.overrides import describe, merge, parse_override, read_file, set_key
from agentrl.config.problems import problems
from agentrl.config.recipe import Recipe
from agentrl.config.settings import Setting, checked
from agentrl.core.registry import nearest

__all__ = ["ConfigError", "detect_device", "dotted_keys", "find_recipe", "load_recipe", "recipe_names", "recipe_of_run"]

_SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
_NAMES = (
    "env.id",
    "agent.id",
    "workflow.id",
    "train_dataset.name",
    "valid_dataset.name",
)  # have kwargs


def recipe_folders() -> list[Path]:
    """Returns the folders searched for recipes: ``recipes`` of the working folder, then the shipped recipes."""
    return [Path("recipes"), _SHIPPED]


def recipe_names() -> list[str]:
    """Returns the names of all recipes that can be found, sorted."""
    return sorted({file.stem for folder in recipe_folders() for file in folder.glob("*.yaml")})


def find_recipe(name_or_path: str) -> Path:
    """Finds the file of a recipe by name or path.

    Raises:
        ConfigError: There is no such recipe; the message has the nearest name and the searched folders.
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
        f"no recipe {name_or_path!r}{_meant(name_or_path, names) or '.'} Known: {', '.join(names)}. "
        f"Looked in {looked}; a path to a .yaml file works too"
    )


def _meant(name: str, names: Sequence[str]) -> str:
    """Returns a hint for a wrong name: the recipe of an environment of this name, else the nearest name."""
    begun = [one for one in names if one.startswith(f"{name.lower().rpartition('-v')[0] or name.lower()}_")]
    best = sorted(begun, key=lambda one: not one.endswith("_grpo"))
    return f", did you mean {best[0]!r}?" if best else nearest(name, list(names))


def load_recipe(
    name_or_path: str | None,
    overrides: Sequence[Setting] = (),
    config_file: str | None = None,
    device: Device | None = None,
) -> Recipe:
    """Builds the recipe of a run.

    Args:
        name_or_path: Name of a recipe, or a YAML file; ``None`` if the rest is complete.
        overrides: ``a.b=value`` texts, whose value is YAML, or pairs of key and value.
        config_file: YAML file that is merged over the recipe.
        device: Device whose part of the recipe is used; by default ``launch.device``, and for ``auto`` the machine's.

    Raises:
        ConfigError: The recipe has problems; the message lists all of them.
    """
    if name_or_path is None and config_file is None and not overrides:
        raise ConfigError(f"name a recipe ({', '.join(recipe_names())}) or give --config FILE")
    files = [find_recipe(name_or_path)] if name_or_path is not None else []
    if config_file is not None:
        files.append(Path(config_file).expanduser())
    wrong: list[str] = []
    layers = [_read_layer(path, wrong) for path in files]
    settings: list[tuple[str, Any]] = []
    for given in overrides:
        try:
            settings.append(parse_override(given) if isinstance(given, str) else checked(*given))
        except ConfigError as error:
            wrong.append(str(error))
    device = device or _wanted_device(layers, settings)
    if device is None:
        device = detect_device()
        wrong += _of_other_machines(layers, settings, device)
    evaluates = _wanted(layers, settings, "trainer", "type", "grpo") is None
    data: dict[str, Any] = {"name": files[0].stem} if files else {}
    for base, parts in layers:
        data = replaced(data, base.get("allocation"))
        for part in (base, *parts_of(parts, device, evaluates=evaluates)):
            data = merge(without_foreign_kwargs(data, part), part)
    chosen: dict[str, Any] = {}
    for key, value in settings:
        if key in _NAMES:
            chosen = set_key(chosen, key, value)
    data = replaced(without_foreign_kwargs(data, chosen), dict(settings).get("allocation"))
    for key, value in settings:
        data = set_key(data, key, value)
    launch = data.get("launch") or {}
    if isinstance(launch, Mapping) and launch.get("device", "auto") == "auto":
        data = set_key(data, "launch.device", device)
    return validate(data, wrong)


def recipe_of_run(run_dir: Path) -> Recipe:
    """Loads the resolved recipe of a run from the run's folder.

    Raises:
        ConfigError: The folder is of another version of agentrl, or damaged; the message lists what does not fit.
    """
    text = (run_dir / "config.json").read_text()
    try:
        return Recipe.model_validate_json(text)
    except ValidationError:
        try:
            return validate(json.loads(text))
        except (ConfigError, ValueError, AttributeError) as error:
            raise ConfigError(f"{run_dir / 'config.json'} is of another version, or damaged: {error}") from error


def without_foreign_kwargs(data: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``data`` without the ``kwargs`` of components that ``layer`` replaces, which belong to the old ones.

    Args:
        data: Settings so far.
        layer: Settings to merge over ``data``.
    """
    result = dict(data)
    for name in _NAMES:
        section, key = name.split(".")
        old, new = data.get(section), layer.get(section)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and key in new and new[key] != old.get(key):
            result[section] = {k: v for k, v in old.items() if k != "kwargs"}
    return result


def validate(data: Mapping[str, Any], wrong: Sequence[str] = ()) -> Recipe:
    """Validates nested plain data as a recipe.

    Args:
        data: Parsed YAML.
        wrong: Problems found earlier, which are reported with those found here.

    Raises:
        ConfigError: There are problems; the message lists all of them.
    """
    found = list(wrong)
    for stand_for in (with_range, expanded):
        try:
            data = stand_for(data)
        except ValueError as error:
            found.append(str(error))
    try:
        # Strict JSON mode: true is not accepted as a number nor "5" as an int, but a list is accepted for a tuple.
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
    """Reads a file's keys and its device parts; appends a message for each unknown key to ``wrong``."""
    base = read_file(path)
    parts: dict[str, dict[str, Any]] = {}
    for name in PARTS:
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
    """Returns ``launch.device`` as the last layer or override sets it; ``None`` if none sets it."""
    wanted = _wanted(layers, settings, "launch", "device", "auto")
    return wanted if wanted in ("cpu", "cuda") else None  # validation refuses other values


def _of_other_machines(
    layers: Sequence[tuple[Mapping[str, Any], Any]], settings: Sequence[tuple[str, Any]], device: Device
) -> list[str]:
    """Returns a problem where the device of this machine would decide for those that a scheduler chooses.

    A cluster's login node often has no GPU; a node that has one is like the others.
    """
    kind = _wanted(layers, settings, "launch", "type", "local")
    own = kind == "ray" and _wanted(layers, settings, "launch", "ray_address", None) == OWN_RAY
    if device == "cuda" or kind not in ("slurm", "ray") or own:
        return []
    return [
        f"launch.device=auto is that of this machine, which has no GPU, and launch.type={kind} runs on others: set "
        "launch.device=cuda, or launch.device=cpu"
    ]


def _wanted(
    layers: Sequence[tuple[Mapping[str, Any], Any]],
    settings: Sequence[tuple[str, Any]],
    section: str,
    key: str,
    default: Any,
) -> Any:
    """Returns the value of ``section.key`` that the last layer or override sets, outside of device parts."""
    wanted = default
    for base, _ in layers:
        own = base.get(section)
        if isinstance(own, Mapping):
            wanted = own.get(key, wanted)
    for name, value in settings:
        if name == f"{section}.{key}":
            wanted = value
        elif name == section and isinstance(value, Mapping):
            wanted = value.get(key, wanted)
    return wanted
