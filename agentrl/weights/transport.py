"""Chooses the transport of new weights to the servers, and describes the costs of each.

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
from agentrl.inference.backend import Transport

PREFERRED: tuple[Transport, ...] = ("shm", "broadcast", "disk")  # by auto, of those that reach the servers
LOOPBACK = ("127.0.0.1", "localhost", "::1")
BUFFERS = 2  # of a version, which take turns
ROOM = 2.2  # times the bytes of a version: the buffers, and some to spare


def choose(
    asked: Literal["auto"] | Transport,
    transports: Sequence[Transport],
    urls: Sequence[str],
    *,
    nbytes: int,
    files_only: bool,
    apart: bool = False,
) -> Transport:
    """Chooses the transport for new weights.

    Args:
        asked: ``weights.transport``.
        transports: Ways in which the servers take weights, see
            :class:`~agentrl.inference.kinds.kind.Capabilities`.
        urls: Servers that run already.
        nbytes: Bytes of a version.
        files_only: Whether the weights can only be sent as a file (an adapter alone).
        apart: Whether the servers that the run starts stand on other machines than the trainer.

    Raises:
        ValueError: No transport that the servers support reaches them.
    """
    if asked != "auto":
        return asked
    here = (*LOOPBACK, socket.gethostname(), socket.getfqdn())
    local = not apart and all(urlsplit(url).hostname in here for url in urls)
    fits = _free() > ROOM * nbytes
    reach = {"shm": local and fits, "broadcast": not files_only and not (local and "disk" in transports), "disk": True}
    for way in PREFERRED:
        if way in transports and reach[way]:
            return way
    raise ValueError(
        f"weights.transport=auto finds no way to the servers: they take weights by {', '.join(transports) or 'none'}"
        f"{', and stand on other hosts' if not local else ''}{', and an adapter travels in a file' * files_only}"
    )


def require_room(nbytes: int) -> None:
    """Check that shared memory has room for both buffers of a version.

    Raises:
        OSError: Shared memory is missing or too small.
    """
    free = _free()
    if free < BUFFERS * nbytes:
        raise OSError(
            f"weights.transport=shm needs {BUFFERS * nbytes / 1e6:.0f} MB in {SHM}, which has {free / 1e6:.0f} MB "
            "free; use weights.transport=disk"
        )


def _free() -> int:
    """Free bytes of shared memory."""
    return shutil.disk_usage(SHM).free if SHM.is_dir() else -1


def costs(nbytes: int, servers: int, folder: Path) -> dict[str, str]:
    """Costs of a push of ``nbytes`` for each transport, in words."""
    size, held = f"{nbytes / 1e6:,.0f} MB", f"{2 * nbytes / 1e6:,.0f} MB"
    readers = "one server" if servers == 1 else f"each of {servers} servers"
    return {
        "shm": f"{size} written to memory and read by {readers}, {held} of memory held; on one host only",
        "disk": f"{size} written to {folder} and read by {readers}, {held} held there; a disk that all of them see",
        "broadcast": f"{size} sent to {readers} through the network, nothing held; servers receive at the same time",
    }
