"""Code of a worker process: ``main`` answers one call after the other until its parent closes the connection.

Guarantees: only the function's own imports are made; the parent's ``__main__`` is run only if the function is defined
in it; errors of the function are sent back as data; the kernel ends this process when the parent dies, even during a
call.
"""

import importlib.util
import os
import pickle
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.host.process import die_with_parent

READY = b"ready"  # the process has started
LOADED = b"loaded"  # the function is imported; its time begins
RETURNED, RAISED = b"+", b"-"  # the first byte of an answer


def pack(function: Callable[..., Any] | str, args: tuple[Any, ...]) -> bytes:
    """Packs a call into bytes, with the module and file of its function.

    Raises:
        TypeError: The function or an argument cannot be pickled.
        ValueError: A name is not ``module:name``.
    """
    if isinstance(function, str) and not all(function.partition(":")):
        raise ValueError(f"function={function!r} must look like 'module:name'")
    try:
        return pickle.dumps((_origin(function), pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{function!r} and its arguments cannot be sent to a worker process ({error}); "
            "want a function at the top level of a module, and plain data"
        ) from error


def unpack_error(data: bytes) -> tuple[Exception | None, str]:
    """Unpacks an error of :func:`answer`: the exception, ``None`` if it could not be pickled, and its traceback."""
    pickled, text = pickle.loads(data)
    return (None if pickled is None else pickle.loads(pickled)), text


def _origin(function: Callable[..., Any] | str) -> tuple[str, str | None] | None:
    """Module and file of a function; ``None`` for ``"module:name"``, which is imported by its name."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, str):
        return None
    name = getattr(function, "__module__", None) or type(function).__module__
    return name, getattr(sys.modules.get(name), "__file__", None)


def main(fd: int, parent_pid: int, memory: int | None) -> None:
    """Serve calls from the connection ``fd``.

    Args:
        fd: File descriptor of this process's end of the connection.
        parent_pid: Process id of the parent.
        memory: Most bytes of data that this process may hold; ``None`` for no limit.
    """
    die_with_parent(parent_pid, signal.SIGKILL)
    os.set_inheritable(fd, False)  # a program that a function starts must not hold the connection open
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    connection = Connection(fd)
    connection.send_bytes(READY)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # the parent closed the pipe; threads that a function left behind must not keep the process
        connection.send_bytes(answer(request, lambda: connection.send_bytes(LOADED)))


def answer(request: bytes, loaded: Callable[[], None]) -> bytes:
    """Run a call and return its answer in bytes; errors of the function become data here.

    Args:
        request: Call in bytes, from :func:`pack`.
        loaded: Function that is called when the call's function and arguments are loaded.
    """
    try:
        origin, call = pickle.loads(request)
        if origin is not None:
            _provide(*origin)
        function, args = pickle.loads(call)
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(import_module(module), name)
        loaded()
        return RETURNED + pickle.dumps(function(*args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the boundary: all errors of a function are sent to its caller
        return RAISED + pickle.dumps((_travelling(error), traceback.format_exc()))


def _travelling(error: Exception) -> bytes | None:
    """The error as bytes; ``None`` if it cannot be pickled and unpickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # still the boundary: an error class may raise anything when it is pickled
        return None
    return data


def _provide(name: str, file: str | None) -> None:
    """Load module ``name`` from its file if an import would not find it."""
    if file is None or (name in sys.modules and name != "__main__"):
        return
    if name == "__main__":
        main_module = sys.modules["__main__"]
        if getattr(main_module, "__file__", None) != file:
            module = ModuleType("__mp_main__")  # the name by which multiprocessing's children know it
            vars(module).update(runpy.run_path(file, run_name="__mp_main__"))
            module.__file__ = file
            sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        return
    try:
        found = importlib.util.find_spec(name)
    except ImportError:  # its parent package is missing
        found = None
    if found is not None and found.origin is not None and Path(found.origin).resolve() == Path(file).resolve():
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return  # unpickling the function then raises an import error
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
