"""Packages that are functions too: ``agentrl.train(...)`` beside ``agentrl.train.loss``.

Guarantees: the package is imported as ever, and its function is imported at the first call; signature and help are
those of the function.
"""

import importlib
import inspect
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):  # noqa: D101 - its `__doc__` is that of the function
    # A package with a function of the same name; `__entry_point__` says where that is.

    __entry_point__: str

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Call and docstring of the function, then the docstring of the package, for ``help``."""
        function, empty = self.__function(), inspect.Signature.empty
        given = [one.replace(annotation=empty) for one in self.__signature__.parameters.values()]
        call = f"{function.__name__}{inspect.Signature(given)}"
        return f"{call}\n\n{inspect.getdoc(function)}\n\nThe package {self.__name__}: {self.__dict__['__doc__']}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.__function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of the function, for ``inspect`` and notebooks."""
        return inspect.signature(self.__function())

    def __function(self) -> Any:
        module, _, name = self.__entry_point__.partition(":")
        return getattr(importlib.import_module(module), name)


def make_callable(package: str, entry_point: str) -> None:
    """Makes a package callable.

    Args:
        package: Name of the package; it is imported.
        entry_point: ``module:function``; imported at the first call.
    """
    module = importlib.import_module(package)
    module.__class__ = CallablePackage
    module.__dict__["__entry_point__"] = entry_point
