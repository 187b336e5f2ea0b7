"""Which way new weights take to the servers, and what each way costs.

Guarantees: ``auto`` is decided from the recipe's servers and the free memory alone, so the plan that is shown says what
the trainer does.
"""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from agentrl.config.recipe import Recipe
from agentrl.core.weight_manifest import SHM
from agentrl.inference.backend import Transport
from agentrl.inference.kinds.kind import server_kind

PREFERRED: tuple[Transport, ...] = ("shm", "broadcast", "disk")  # by auto, of those that reach the servers
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROOM = 2.2  # times the bytes of a version: two buffers, and some to spare


def recipe_transport(recipe: Recipe) -> Transport:
    """The transport of a recipe, see :func:`choose`."""
    inference, trainer, asked = recipe.inference, recipe.trainer, recipe.weights.transport
    if asked != "auto":
        return asked
    files_only = trainer.lora_rank is not None and trainer.lora_push == "adapter"
    transports = server_kind(inference.engine).capabilities.transports
    return choose(asked, transports, inference.urls, files_only=files_only)


def choose(
    asked: Literal["auto"] | Transport, transports: Sequence[Transport], urls: Sequence[str], *, files_only: bool
) -> Transport:
    """The way for a recipe; shared memory may still give way to the disk, see :func:`file_transport`.

    Args:
        asked: ``weights.transport``.
        transports: Ways in which the servers take weights, see
            :class:`~agentrl.inference.kinds.kind.Capabilities`.
        urls: Servers that run already; those that a run starts stand on its own host.
        files_only: Whether what is sent has to be a file (an adapter alone).

    Raises:
        ValueError: The servers take weights in no way that reaches them.
    """
    if asked != "auto":
        return asked
    local = all(urlsplit(url).hostname in (*LOOPBACK, socket.gethostname(), socket.getfqdn()) for url in urls)
    reach = {"shm": local, "broadcast": not files_only, "disk": True}
    for way in PREFERRED:
        if way in transports and reach[way]:
            return way
    raise ValueError(
        f"weights.transport=auto finds no way to the servers: they take weights by {', '.join(transports) or 'none'}"
        f"{', and stand on other hosts' if not local else ''}{', and an adapter travels in a file' * files_only}"
    )


def file_transport(asked: Literal["auto", "shm", "disk"], nbytes: int) -> Literal["shm", "disk"]:
    """``auto`` takes tmpfs where two copies fit with room to spare.

    Raises:
        OSError: ``shm`` was asked for and does not fit or does not exist.
    """
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    fits = free > ROOM * nbytes
    if asked == "shm" and not fits:
        raise OSError(
            f"weights.transport=shm needs {ROOM * nbytes / 1e6:.0f} MB in {SHM}, which has {free / 1e6:.0f} MB free; "
            "use weights.transport=disk"
        )
    return "shm" if fits and asked != "disk" else "disk"


def costs(nbytes: int, servers: int, folder: Path) -> dict[Transport, str]:
    """What a push of ``nbytes`` costs on each way, in words."""
    size, held = f"{nbytes / 1e6:,.0f} MB", f"{2 * nbytes / 1e6:,.0f} MB"
    readers = "one server" if servers == 1 else f"each of {servers} servers"
    return {
        "shm": f"{size} written to memory and read by {readers}, {held} of memory held; on one host only",
        "disk": f"{size} written to {folder} and read by {readers}, {held} held there; a disk that all of them see",
        "broadcast": f"{size} sent to {readers} through the network, nothing held; servers receive at the same time",
    }
