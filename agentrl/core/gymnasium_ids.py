"""Our environments under Gymnasium's ids: ``gymnasium.make("agentrl/GSM8K-v0")`` after ``import agentrl``.

Guarantees: importing agentrl does not import gymnasium, and the order of the two imports does not matter: where
gymnasium is loaded already its registry is told at once, otherwise as soon as it is loaded.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from types import ModuleType

NAMESPACE = "agentrl"
_REGISTRY = "gymnasium.envs.registration"
_ID = re.compile(r"[\w.-]+-v\d+")  # what gymnasium takes as a name after the namespace


def announce(id: str) -> None:
    """Tell gymnasium, which must be loaded, of one environment."""
    if not _ID.fullmatch(id):
        return  # gymnasium knows ids with a version only
    import gymnasium

    full = f"{NAMESPACE}/{id}"
    gymnasium.registry.pop(full, None)  # registered anew, without gymnasium's warning
    gymnasium.register(id=full, entry_point="agentrl.core.bridge:GymnasiumBridge", kwargs={"id": id})


def announce_all() -> None:
    """Tell gymnasium of all environments now, or when it is loaded."""
    if _REGISTRY in sys.modules:
        _tell()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _tell() -> None:
    from agentrl.core.registry import registered

    for id in registered("env"):
        announce(id)


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself; has gymnasium's loader call us after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            _tell()

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec
