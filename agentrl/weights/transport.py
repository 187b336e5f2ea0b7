"""Which way new weights take to the servers, and what each way costs.

Guarantees: ``auto`` is decided from the recipe's servers and the free memory alone, and once: when a run starts
(:mod:`agentrl.launch.resolve`).
"""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from agentrl.core.weight_manifest import SHM

Transport = Literal["shm", "disk", "broadcast"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
BUFFERS = 2  # of a version, which take turns
ROOM = 2.2  # times the bytes of a version: the buffers, and some to spare


def choose(
    asked: Literal["auto"] | Transport, engine: str, urls: Sequence[str], *, nbytes: int, files_only: bool
) -> Transport:
    """The way for new weights.

    Args:
        asked: ``weights.transport``.
        engine: ``inference.engine``.
        urls: Servers that run already; those that a run starts stand on its own host.
        nbytes: Bytes of a version.
        files_only: Whether what is sent has to be a file (an adapter alone).
    """
    if asked != "auto":
        return asked
    if all(urlsplit(url).hostname in (*LOOPBACK, socket.gethostname(), socket.getfqdn()) for url in urls):
        return "shm" if _free() > ROOM * nbytes else "disk"
    return "disk" if engine == "vllm" or files_only else "broadcast"


def require_room(nbytes: int) -> None:
    """See that shared memory holds both buffers of a version.

    Raises:
        OSError: It does not, or there is none.
    """
    free = _free()
    if free < BUFFERS * nbytes:
        raise OSError(
            f"weights.transport=shm needs {BUFFERS * nbytes / 1e6:.0f} MB in {SHM}, which has {free / 1e6:.0f} MB "
            "free; use weights.transport=disk"
        )


def _free() -> int:
    """Bytes that shared memory has room for."""
    return shutil.disk_usage(SHM).free if SHM.is_dir() else -1


def costs(nbytes: int, servers: int, folder: Path) -> dict[str, str]:
    """What a push of ``nbytes`` costs on each way, in words."""
    size, held = f"{nbytes / 1e6:,.0f} MB", f"{2 * nbytes / 1e6:,.0f} MB"
    readers = "one server" if servers == 1 else f"each of {servers} servers"
    return {
        "shm": f"{size} written to memory and read by {readers}, {held} of memory held; on one host only",
        "disk": f"{size} written to {folder} and read by {readers}, {held} held there; a disk that all of them see",
        "broadcast": f"{size} sent to {readers} through the network, nothing held; servers receive at the same time",
    }
