"""Extension by name: ids for environments, agents, workflows and datasets, or a path to a class.

Guarantees: registering imports nothing; a name that is not known is answered with the nearest that is. Ids follow
Gymnasium's convention (``entry_point="module:Class"``); a path (``envs/mine.py:MyEnv``) needs no registration.
"""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Literal

Kind = Literal["env", "agent", "workflow", "dataset"]

_ENTRY_POINTS: dict[str, dict[str, str]] = {"env": {}, "agent": {}, "workflow": {}, "dataset": {}}


def register(id: str, entry_point: str, kind: Kind = "env") -> None:
    """Give a class or function a name that recipes can use.

    Args:
        id: The name.
        entry_point: ``module:attribute``; imported on first use.
        kind: What it is.
    """
    if ":" not in entry_point:
        raise ValueError(f"entry_point={entry_point!r} must look like 'module:Class'")
    _ENTRY_POINTS[kind][id] = entry_point


def registered(kind: Kind) -> list[str]:
    """All ids of a kind, sorted."""
    return sorted(_ENTRY_POINTS[kind])


def nearest(name: str, names: list[str]) -> str:
    """``", did you mean 'x'?"`` for the closest of ``names``, or an empty string."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def load(kind: Kind, id: str) -> Any:
    """The class or function behind an id or a path.

    Raises:
        LookupError: The id is unknown, the file does not exist, or it has no such attribute.
    """
    entry_point = _ENTRY_POINTS[kind].get(id)
    if entry_point is None and ":" not in id:
        names = registered(kind)
        raise LookupError(
            f"{kind} {id!r} is not registered{nearest(id, names)}. Known: {', '.join(names)}. "
            f"A path works too: path/to/file.py:ClassName"
        )
    module_name, _, attribute = (entry_point or id).rpartition(":")
    module = _import_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise LookupError(f"{module_name} has no {attribute!r}{nearest(attribute, names)}")
    return getattr(module, attribute)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise LookupError(f"no file {path} (looked in {path.resolve().parent})")
    name = f"agentrl_user_{path.stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LookupError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
