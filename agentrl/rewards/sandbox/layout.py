"""Decides which files of this machine code in a sandbox can see.

Guarantees: only system programs and libraries, the running Python installation, and folders that were requested by
name; all read-only. Installed packages are hidden unless requested, so that neither this repository nor a dataset can
be read.
"""

import os
import site
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr")
LIBRARY_CACHE = "/etc/ld.so.cache"
DISK = "/tmp"  # the only writable folder
WORKING_FOLDER = "/tmp/work"
DEVICE_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": DISK,  # shared memory counts as disk
}
# like -I without environment variables and user packages, but modules next to the code can be imported
CODE_FLAGS = ("-E", "-s", "-B")
SUPERVISOR_FLAGS = ("-I", "-S")
NO_PACKAGES = "-S"


@dataclass(frozen=True)
class Layout:
    """The files that are visible inside a sandbox.

    Attributes:
        show: Files and folders, visible read-only at the same path; none is below another.
        hide: Folders below those of ``show`` that appear empty.
        links: Symbolic links, path to target.
        python: Interpreter of the supervisor.
        code: Command that runs Python code; the file's name follows.
    """

    show: tuple[str, ...]
    hide: tuple[str, ...]
    links: dict[str, str]
    python: str
    code: tuple[str, ...]

    def parents(self) -> list[str]:
        """Return the parent folders of all visible files, outer ones first."""
        paths = (*self.show, *DEVICES, *self.links)
        return sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/", DISK})


def machine_layout(*, packages: bool = False, read_only: Iterable[Path] = ()) -> Layout:
    """Return the layout for this machine.

    Args:
        packages: Whether the packages of the running environment are visible and can be imported.
        read_only: Further files and folders to make visible.

    Raises:
        ValueError: A path of ``read_only`` does not exist, or is the root or the temporary folder.
    """
    extra = [os.path.abspath(path) for path in read_only]
    for path in extra:
        if not os.path.exists(path) or path in ("/", DISK, WORKING_FOLDER):
            raise ValueError(f"read_only={path}: want an existing path other than /, {DISK} and {WORKING_FOLDER}")
    links = {path: os.readlink(path) for path in SYSTEM_FOLDERS if os.path.islink(path)}
    show = {path for path in SYSTEM_FOLDERS if os.path.isdir(path) and path not in links}
    show.update((sys.base_prefix, os.path.realpath(sys.base_prefix), LIBRARY_CACHE, *extra))
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    if packages:
        show.add(sys.prefix)
        code, hide = (sys.executable, *CODE_FLAGS), []
    else:
        code = (base, *CODE_FLAGS, NO_PACKAGES)
        hide = site.getsitepackages([sys.base_prefix, os.path.realpath(sys.base_prefix), "/usr", "/usr/local"])
        hide += ["/usr/lib/python3/dist-packages"]
    shown = _outermost(path for path in show if os.path.exists(path))
    hidden = {path for path in hide if os.path.isdir(path) and os.path.realpath(path) == path}
    return Layout(shown, _outermost(path for path in hidden if _below(path, shown)), links | DEVICE_LINKS, base, code)


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path != folder and os.path.commonpath((path, folder)) == folder for folder in folders)


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    unique = sorted(set(paths))
    return tuple(path for path in unique if not _below(path, unique))
