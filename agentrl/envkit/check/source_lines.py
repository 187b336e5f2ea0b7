"""Finds the user's source line of an exception, a stack, a waiting task, or a method.

Guarantees: a line is in one of the user's files, never in the standard library, an installed package or agentrl;
the package of the checked environment counts as the user's. If there is no such line, the result is empty.
"""

import asyncio
import functools
import inspect
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import agentrl

_AGENTRL = os.path.realpath(os.path.dirname(agentrl.__file__))
_EXAMPLES = tuple(os.path.join(_AGENTRL, folder) + os.sep for folder in ("envs", "agents"))  # count as user code
_FOREIGN = tuple(
    os.path.realpath(path) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@functools.lru_cache(maxsize=4096)
def _is_local(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = os.path.realpath(filename)
    if path.startswith(_EXAMPLES):
        return True
    return not path.startswith((_AGENTRL + os.sep, *_FOREIGN))


class UserLines:
    """Finds the user's source lines; :meth:`add` marks an environment's files as the user's."""

    def __init__(self) -> None:
        self._own: frozenset[str] = frozenset()
        self._folder = Path.cwd()  # read now, because the environment may change it

    def add(self, env: object) -> None:
        """Mark the files of an environment's classes as the user's."""
        package = _class_of(env).__module__.partition(".")[0]
        owners = [owner for owner in _own_classes(env) if owner.__module__.partition(".")[0] == package]
        codes = [getattr(value, "__code__", None) for owner in owners for value in vars(owner).values()]
        self._own |= {code.co_filename for code in codes if code is not None}

    def is_user(self, filename: str) -> bool:
        """Whether a file is the user's."""
        return filename in self._own or _is_local(filename)

    def of_error(self, error: BaseException) -> str:
        """Finds the innermost user's line in an exception's traceback, or in those of an exception group's members."""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{self._short(error.filename)}:{error.lineno}"
        for member in getattr(error, "exceptions", ()):
            found = self.of_error(member)
            if found:
                return found
        found, traceback = "", error.__traceback__
        while traceback is not None:
            if self.is_user(traceback.tb_frame.f_code.co_filename):
                found = self.place(traceback.tb_frame.f_code, traceback.tb_lineno)
            traceback = traceback.tb_next
        if not found and error.__cause__ is not None:
            return self.of_error(error.__cause__)
        return found

    def of_frame(self, frame: FrameType | None) -> str:
        """Finds the innermost user's line of a running stack."""
        while frame is not None:
            if self.is_user(frame.f_code.co_filename):
                return self.place(frame.f_code, frame.f_lineno)
            frame = frame.f_back
        return ""

    def of_tasks(self, tasks: Iterable["asyncio.Task[Any]"]) -> str:
        """Finds the innermost user's line at which a task waits, for the first task that has one."""
        for task in tasks:
            found = ""
            for code, line in _awaited(task.get_coro()):
                if self.is_user(code.co_filename):
                    found = self.place(code, line)
            if found:
                return found
        return ""

    def of_method(self, env: object, *names: str) -> str:
        """Finds the line of the first of these methods that the user's classes define, else of the class."""
        for name in names:
            for owner in _own_classes(env):
                function = vars(owner).get(name)
                function = getattr(function, "__func__", getattr(function, "fget", function))
                code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
                if code is not None:
                    return self.place(code, code.co_firstlineno)
        return self.of_class(env)

    def of_class(self, env: object) -> str:
        """Finds file and line of the environment's class."""
        owner = _class_of(env)
        try:
            file = inspect.getsourcefile(owner)
            return f"{self._short(file)}:{inspect.getsourcelines(owner)[1]} {owner.__qualname__}" if file else ""
        except (OSError, TypeError):
            return ""

    def place(self, code: CodeType, line: int | None) -> str:
        """Formats a code line as ``file.py:12 Class.step``."""
        name = code.co_qualname.replace("<locals>.", "")
        return f"{self._short(code.co_filename)}:{line}" + (f" {name}" if name != "<module>" else "")

    def _short(self, filename: str) -> str:
        path = Path(filename)
        return str(path.relative_to(self._folder) if path.is_relative_to(self._folder) else path)


def _class_of(env: object) -> type:
    return env if isinstance(env, type) else type(getattr(env, "unwrapped", env))


def _own_classes(env: object) -> Iterator[type]:
    return (owner for owner in _class_of(env).__mro__ if not _is_ours(owner.__module__))


def _is_ours(module: str) -> bool:
    return module.startswith("agentrl.") and not module.startswith(("agentrl.envs.", "agentrl.agents."))


def _awaited(awaited: Any) -> Iterator[tuple[CodeType, int | None]]:
    """Yields code and line of a suspended coroutine and of those that it awaits, outermost first."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        inner = getattr(awaited, "cr_await", None)
        awaited = inner if inner is not None else getattr(awaited, "gi_yieldfrom", None)
