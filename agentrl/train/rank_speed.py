"""Compares the speed of the trainer's ranks, and names those that are slower than the rest.

In a step all ranks wait for one another, so the time of an update is that of the slowest one on each of them and does
not say which that is. Each rank therefore computes the same few products alone and takes the time.

Guarantees: the products need no other rank; a trial takes some milliseconds; on one rank nothing is measured. A rank is
named in the log once, after several steps in a row, so that a moment's load of a machine is not; several slow ones, as
those of one machine, do not hide one another.
"""

import socket
import time
from collections.abc import Callable, Sequence
from statistics import median_low

import torch
import torch.distributed as dist

SLOW = 1.5  # times as long as the median of the others
IN_A_ROW = 10  # steps
TRIALS, PRODUCTS = 5, 4  # the fastest trial counts: others had to share a core for a moment
SIDE = {"cpu": 256, "cuda": 4096}  # of the matrices


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """Returns the rank that took longest, and how many times as long as the median of the others.

    Args:
        seconds: Times of at least two ranks, by rank.
    """
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, slowness(seconds, rank)


def slowness(seconds: Sequence[float], rank: int) -> float:
    """Returns how many times as long a rank took as the median of the others."""
    return seconds[rank] / median_low([one for index, one in enumerate(seconds) if index != rank])


class RankSpeed:
    """Measures the ranks after each step; a collective.

    Args:
        device: Device of this rank.
        seconds: Function that computes the products on this rank and returns its time; for tests.
    """

    def __init__(self, device: torch.device, seconds: Callable[[], float] | None = None) -> None:
        self._device = device
        self._seconds = seconds or self._trial
        self._hosts: list[str] = []
        self._slow: dict[int, int] = {}  # slow rank -> steps in a row
        self._named: set[int] = set()

    def measure(self) -> dict[str, float]:
        """Returns the metrics of a step, the same on every rank; none on one rank."""
        world = dist.get_world_size()
        if world == 1:
            return {}
        if not self._hosts:
            self._hosts = [""] * world
            dist.all_gather_object(self._hosts, socket.gethostname())
        mine = torch.tensor([self._seconds()], device=self._device)
        found = torch.empty(world, device=self._device)
        dist.all_gather_into_tensor(found, mine)
        seconds = found.tolist()
        self._name(seconds)
        rank, ratio = slowest(seconds)
        lasting = sum(steps >= IN_A_ROW for steps in self._slow.values())
        return {"ranks/slowest": float(rank), "ranks/slowdown": ratio, "ranks/slow": float(lasting)}

    def _name(self, seconds: Sequence[float]) -> None:
        """Tells on rank 0 of ranks that have been slow for several steps."""
        ratios = {rank: slowness(seconds, rank) for rank in range(len(seconds))}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, ratio in ratios.items() if ratio > SLOW}
        for rank in [one for one, steps in self._slow.items() if steps >= IN_A_ROW and one not in self._named]:
            self._named.add(rank)
            if dist.get_rank() == 0:
                print(
                    f"trainer rank {rank} on {self._hosts[rank]} takes {ratios[rank]:.1f} times as long as the others "
                    "for the same products, and all wait for it: look for other processes, heat, or a slower card "
                    "there",
                    flush=True,
                )

    def _trial(self) -> float:
        side = SIDE[self._device.type]
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        matrix = torch.full((side, side), 1 / side, device=self._device, dtype=dtype)
        return min(self._once(matrix) for _ in range(TRIALS))

    def _once(self, matrix: torch.Tensor) -> float:
        self._wait()
        began = time.monotonic()
        for _ in range(PRODUCTS):
            matrix = matrix @ matrix
        self._wait()
        return time.monotonic() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
