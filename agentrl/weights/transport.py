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

Transport = Literal["shm", "disk", "broadcast"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROOM = 2.2  # times the bytes of a version: two buffers, and some to spare


def recipe_transport(recipe: Recipe) -> Transport:
    """The transport of a recipe, see :func:`choose`."""
    inference, trainer = recipe.inference, recipe.trainer
    files_only = trainer.lora_rank is not None and trainer.lora_push == "adapter"
    return choose(recipe.weights.transport, inference.engine, inference.urls, files_only=files_only)


def choose(asked: Literal["auto"] | Transport, engine: str, urls: Sequence[str], *, files_only: bool) -> Transport:
    """The way for a recipe; shared memory may still give way to the disk, see :func:`file_transport`.

    Args:
        asked: ``weights.transport``.
        engine: ``inference.engine``.
        urls: Servers that run already; those that a run starts stand on its own host.
        files_only: Whether what is sent has to be a file (an adapter alone).
    """
    if asked != "auto":
        return asked
    if all(urlsplit(url).hostname in (*LOOPBACK, socket.gethostname(), socket.getfqdn()) for url in urls):
        return "shm"
    return "disk" if engine == "vllm" or files_only else "broadcast"


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
