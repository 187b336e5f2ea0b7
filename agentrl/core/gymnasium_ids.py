"""Registers environments with Gymnasium: ``gymnasium.make("agentrl/GSM8K-v0")`` works after ``import agentrl``.

Guarantees: importing agentrl does not import gymnasium, and the order of the two imports does not matter. If
gymnasium's registry is loaded already, environments are registered at once, else as soon as it is loaded.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMESPACE = "agentrl"
_REGISTRY = "gymnasium.envs.registration"
_ID = re.compile(r"[\w.-]+-v\d+")  # names that gymnasium accepts after the namespace


def announce(id: str) -> None:
    """Registers one environment with gymnasium if gymnasium's registry is loaded."""
    registration = sys.modules.get(_REGISTRY)
    if registration is None or not hasattr(registration, "register") or not _ID.fullmatch(id):
        return  # gymnasium accepts only ids with a version
    full = f"{NAMESPACE}/{id}"
    registration.registry.pop(full, None)  # avoids gymnasium's warning about a second registration
    registration.register(
        id=full, entry_point="agentrl.envkit.gymnasium_bridge:GymnasiumBridge", kwargs={"agentrl_env": id}
    )  # fmt: skip


def announce_all(ids: Callable[[], Iterable[str]]) -> None:
    """Registers all environments with gymnasium now, and again when gymnasium's registry is loaded.

    Args:
        ids: Function that returns the ids of the registered environments.
    """
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(ids))
    for id in ids():
        announce(id)


class _Watch:
    """Import hook that registers the environments after gymnasium's registry is loaded.

    It is no subclass of ``importlib.abc.MetaPathFinder``, because importing that takes longer than the rest of this
    module.
    """

    def __init__(self, ids: Callable[[], Iterable[str]]) -> None:
        self._ids = ids
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY or self._asking:
            return None
        self._asking = True  # find_spec below calls this hook again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            for id in self._ids():
                announce(id)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec
