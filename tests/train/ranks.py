"""Runs a function on forked gloo ranks: torch and transformers are imported once, by the process that forks."""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def on_ranks(world: int, function: Callable[[int], None]) -> None:
    """Runs ``function(rank)`` on ``world`` ranks, and fails if it fails on one of them.

    Call it in a process whose torch has not started threads, and that is in no process group: see ``python -m
    tests.train.meshes``.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    pids = []
    for rank in range(world):
        if not (pid := os.fork()):
            os._exit(_rank(rank, world, port, function))
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def _rank(rank: int, world: int, port: int, function: Callable[[int], None]) -> int:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        function(rank)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.disable()
    return 0
