"""Registry: finds environments, agents, workflows and more by id, by the path of a class, or in ``./envs``.

Guarantees: registering imports nothing; the error for an unknown name suggests the nearest known name. Ids follow
Gymnasium's convention (``Name-v0``, ``entry_point="module:Class"``); ``name`` in upper or lower case means the newest
version of ``Name``. A path (``envs/mine.py:MyEnv``) or a module (``package.module:MyEnv``) needs no registration; the
only environment of a file is found as ``mine.py``, and one in ``./envs/mine.py`` as ``mine``, ``mine-v0`` or ``MyEnv``.
"""

import difflib
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from agentrl.core.gymnasium_ids import announce
from agentrl.core.import_file import import_file, import_module
from agentrl.core.local_envs import MAKER, check_syntax, classes_in, local_files, names_in

Kind = Literal["env", "agent", "workflow", "dataset", "reward", "advantage", "objective", "preset", "trainer", "server"]

_VERSIONED = re.compile(r"(?P<name>.+)-v(?P<version>\d+)")


@dataclass(frozen=True)
class Spec:
    """An entry of the registry.

    Attributes:
        id: Full id.
        entry_point: ``module:attribute`` or ``file.py:attribute``.
        kwargs: Default arguments of the class.
    """

    id: str
    entry_point: str
    kwargs: dict[str, Any] = field(default_factory=dict)


_SPECS: dict[str, dict[str, Spec]] = {kind: {} for kind in get_args(Kind)}
_PROVIDERS: dict[str, list[str]] = {}  # kind -> modules to import for more ids


def register(id: str, entry_point: str, kind: Kind = "env", kwargs: dict[str, Any] | None = None) -> None:
    """Gives a class or function an id for recipes and :func:`agentrl.make`.

    An environment whose id ends in ``-v<number>`` is also registered with ``gymnasium.make``, as ``agentrl/<id>``.

    Args:
        id: New id; environments follow Gymnasium's ``Name-v0``.
        entry_point: ``module:attribute``; imported on first use.
        kind: Kind of component: environment, agent, workflow and so on.
        kwargs: Default arguments of the class.

    Raises:
        ValueError: The entry point has another form, or the kind is unknown.
    """
    if not isinstance(entry_point, str) or ":" not in entry_point:
        raise ValueError(f"entry_point={entry_point!r} must look like 'module:Class'")
    if kind not in _SPECS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(_SPECS)}{nearest(kind, list(_SPECS))}")
    _SPECS[kind][id] = Spec(id, entry_point, dict(kwargs or {}))
    if kind == "env":
        announce(id)


def provide(module: str, *kinds: Kind) -> None:
    """Names a module that registers ids of some kinds; it is imported when one of these kinds is first looked up."""
    for kind in kinds:
        _PROVIDERS.setdefault(kind, []).append(module)


def registered(kind: Kind) -> list[str]:
    """Returns all ids of a kind, sorted."""
    return sorted(_known(kind))


def _known(kind: Kind) -> dict[str, Spec]:
    while waiting := _PROVIDERS.get(kind):
        importlib.import_module(waiting.pop())
    return _SPECS[kind]


def nearest(name: str, names: list[str]) -> str:
    """Returns ``", did you mean 'x'?"`` for the closest of ``names``, or an empty string."""
    close = closest(name, names)
    return f", did you mean {close!r}?" if close else ""


def closest(name: str, names: Sequence[str], cutoff: float = 0.5) -> str | None:
    """Returns the one of ``names`` that is spelled most like ``name``, or ``None`` if none is like it."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return found[0] if found else None


def spec_of(kind: Kind, id: str) -> Spec:
    """Finds the entry of an id or a path without importing it.

    Raises:
        LookupError: The id is unknown.
    """
    if not isinstance(id, str) or not id.strip(" :"):
        raise LookupError(f"{kind} {id!r}: want an id, or path/to/file.py:name")
    full = _full_id(kind, id)
    if full is not None:
        return _SPECS[kind][full]
    if ":" in id:
        return Spec(id, id)
    if id.endswith(".py") and not Path(id).is_file():
        raise LookupError(f"no file {id} (looked in {Path(id).resolve().parent})")
    if kind == "env":
        found = _local(id)
        if found is not None:
            return Spec(id, found)
    names = registered(kind)
    if kind == "env":
        names += [file.stem for file in local_files()]
    known = [*names, *(_VERSIONED.sub(r"\g<name>", name).lower() for name in names)]
    known += [f"{id}.py"] * Path(f"{id}.py").is_file()
    what = "ClassName" if kind in ("env", "agent", "workflow", "trainer", "server") else "function"
    raise LookupError(
        f"{kind} {id!r} is not registered{nearest(id, known) or '.'} Known: {', '.join(names) or 'none'}. "
        f"A path or a module works too: path/to/file.py:{what}, package.module:{what}"
    )


def load(kind: Kind, id: str) -> Any:
    """Imports the class or function of an id or a path.

    Raises:
        LookupError: The id is unknown, the file or module does not exist, or it has no such attribute.
        UserFileError: The file or module cannot be imported.
    """
    module_name, _, attribute = spec_of(kind, id).entry_point.rpartition(":")
    module = import_file(Path(module_name)) if module_name.endswith(".py") else import_module(module_name)
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise LookupError(f"{module_name} has no {attribute!r}{nearest(attribute, names)}")
    return getattr(module, attribute)


def require(kind: Kind, id: str) -> None:
    """Checks that an id or a path exists without importing it.

    Raises:
        LookupError: The id is unknown, the file does not exist, or the file does not define the name.
    """
    module, _, attribute = spec_of(kind, id).entry_point.rpartition(":")
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise LookupError(f"no file {module} (looked in {Path(module).resolve().parent})")
        names = names_in(Path(module))
        if names is not None and attribute not in names:
            raise LookupError(f"{module} has no {attribute!r}{nearest(attribute, names)}")


def gymnasium_names() -> list[str]:
    """Returns the names under which ``gymnasium.make`` finds environments: registered ids, and those in ``./envs``."""
    local: list[str] = []
    for file in local_files():
        classes = classes_in(file)
        names = [*classes, file.stem] if len(classes) == 1 else classes
        local += [f"{name}-v0" for name in names if name != MAKER and _full_id("env", name) is None]
    return [*registered("env"), *local]


def _full_id(kind: Kind, id: str) -> str | None:
    """Returns the registered id for an id, or for a name in any case (its newest version); ``None`` if unknown."""
    specs = _known(kind)
    if id in specs:
        return id
    versions: dict[int, str] = {}
    for full in specs:
        match = _VERSIONED.fullmatch(full)
        if full.lower() == id.lower():
            return full
        if match and match["name"].lower() == id.lower():
            versions[int(match["version"])] = full
    return versions[max(versions)] if versions else None


def _local(id: str) -> str | None:
    """Returns ``file.py:Class`` of an environment in ``./envs``, by the name of its file or its class.

    Raises:
        LookupError: The file has several environments, or several files have one of this name.
    """
    name = _VERSIONED.sub(r"\g<name>", id)
    files = local_files()
    if id.endswith(".py") and Path(id).is_file():
        files, name = [Path(id)], Path(id).stem
    for file in files:
        if file.stem.lower() == name.lower():
            check_syntax(file)
            classes = classes_in(file)
            exact = [one for one in classes if one.lower() == name.lower().replace("_", "")]
            if len(exact) == 1 or len(classes) == 1:
                return f"{file}:{(exact or classes)[0]}"
            raise LookupError(
                f"{file} has {len(classes)} environments"
                f" ({', '.join(classes) or 'a class needs a base from agentrl, a function the name make_env'}); "
                f"say which: {file}:ClassName"
            )
    found = [f"{file}:{one}" for file in files for one in classes_in(file) if one.lower() == name.lower()]
    if len(found) > 1:
        raise LookupError(f"environment {id!r} is in several files, say which: {', '.join(found)}")
    return found[0] if found else None
