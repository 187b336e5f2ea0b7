"""Imports a user's Python file, or a module, that a path or an entry point names.

Guarantees: a file is run once, and again if it failed; whatever its code raises comes out as one
:class:`UserFileError` that names the file and the line; a module of the working folder is found whichever way the
program was started. :func:`being_imported` says whose code runs.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.core.extras import extra_of, install_hint

_IMPORTING = threading.RLock()
_RUNNING = threading.local()  # `names`: files and modules whose code this thread is running, outermost first
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep


class UserFileError(ImportError):
    """A user's file cannot be imported; the message has the file, the line and the error."""


def import_file(path: Path) -> Any:
    """Imports a Python file as a module.

    Raises:
        LookupError: There is no such file, or it is not a Python file.
        UserFileError: The file's code failed.
    """
    if not path.is_file():
        raise LookupError(f"no file {path} (looked in {path.resolve().parent})")
    name = f"agentrl_user_{path.stem}_{abs(hash(path.resolve()))}"
    with _IMPORTING:  # another thread must not see a partly run module
        return sys.modules[name] if name in sys.modules else _run(path, name)


def import_module(name: str) -> Any:
    """Imports a module of the working folder or of an installed package.

    Raises:
        ModuleNotFoundError: There is no such module.
        UserFileError: The module's code failed.
    """
    if name.partition(".")[0] == "agentrl":
        return importlib.import_module(name)
    _add_working_folder()
    try:
        with _running(name):
            return importlib.import_module(name)
    except Exception as error:  # a module is code of its author and may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            text = f"no module {error.name!r} (looked in {Path.cwd()} and in the installed packages)"
            raise ModuleNotFoundError(text, name=error.name) from error
        raise _told(error, None) from error


def being_imported() -> str | None:
    """Returns the file or module that is being imported here, where the caller is code of that file; else ``None``."""
    names: list[str] = getattr(_RUNNING, "names", [])
    return names[-1] if names else None


@contextlib.contextmanager
def _running(name: str) -> Iterator[None]:
    names = _RUNNING.__dict__.setdefault("names", [])
    names.append(name)
    try:
        yield
    finally:
        names.pop()


def _add_working_folder() -> None:
    """Let the working folder's modules be found: ``python -m`` does so, a console script does not."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # last, so that it hides no installed package


def _run(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LookupError(f"{path} is not a Python file")
    _add_working_folder()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    is_loaded = False
    try:
        with _running(str(path)):
            spec.loader.exec_module(module)
        is_loaded = True
    except SystemExit as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ImportError(f"{line.filename}:{line.lineno} ended the program while {path} was imported") from error
    except Exception as error:  # a file is code of its author and may raise anything
        raise _told(error, path) from error
    finally:
        if not is_loaded:
            del sys.modules[name]  # else the partly run module would be found the next time
    return module


def _told(error: Exception, path: Path | None) -> ImportError:
    """Returns the error for a user, with the traceback of the code that failed."""
    what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename:
        place, what = f"{_short(error.filename)}:{error.lineno}", f"cannot be parsed: {error.msg}"
    else:
        place = _place(error, path)
    extra = extra_of(getattr(error, "name", None) or "") if isinstance(error, ModuleNotFoundError) else None
    hint = f"; it comes with {install_hint(extra)}" if extra else ""
    told = UserFileError(f"{place}: {what}{hint}", name=getattr(error, "name", None))
    return told.with_traceback(error.__traceback__)


def _place(error: Exception, path: Path | None) -> str:
    """Returns ``file.py:3`` of the innermost frame that is a user's, or of the file itself."""
    import sysconfig  # only here: agentrl is imported often, files fail rarely

    foreign = (_OURS, "<", *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")))
    lines = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(foreign)]
    if not lines:
        return str(path) if path is not None else "an import"
    return f"{_short(lines[-1].filename)}:{lines[-1].lineno}"


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else filename
