"""Our environments under Gymnasium's ids: ``gymnasium.make("agentrl/GSM8K-v0")`` after ``import agentrl``.

Guarantees: importing agentrl does not import gymnasium, and the order of the two imports does not matter: where
gymnasium's registry is loaded already it is told at once, otherwise whenever it is loaded.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMESPACE = "agentrl"
_REGISTRY = "gymnasium.envs.registration"
_ID = re.compile(r"[\w.-]+-v\d+")  # what gymnasium takes as a name after the namespace


def announce(id: str) -> None:
    """Tell gymnasium of one environment, where its registry is loaded."""
    registration = sys.modules.get(_REGISTRY)
    if registration is None or not hasattr(registration, "register") or not _ID.fullmatch(id):
        return  # gymnasium knows ids with a version only
    full = f"{NAMESPACE}/{id}"
    registration.registry.pop(full, None)  # registered anew, without gymnasium's warning
    registration.register(
        id=full, entry_point="agentrl.envkit.gymnasium_bridge:GymnasiumBridge", kwargs={"agentrl_env": id}
    )  # fmt: skip


def announce_all(ids: Callable[[], Iterable[str]]) -> None:
    """Tell gymnasium of all environments now, and whenever its registry is loaded.

    Args:
        ids: Gives the ids of the registered environments.
    """
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(ids))
    for id in ids():
        announce(id)


class _Watch:
    """Finds nothing itself; has the loader of gymnasium's registry call us after it.

    No subclass of ``importlib.abc.MetaPathFinder``: importing that takes longer than all the rest of this.
    """

    def __init__(self, ids: Callable[[], Iterable[str]]) -> None:
        self._ids = ids
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY or self._asking:
            return None
        self._asking = True  # the others are asked through the same door
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
