"""Process group through which a trainer broadcasts new weights to its servers.

Guarantees: the group is one beside torch's default group, which need not exist; the sender listens on a free port and
nobody waits longer than the given seconds. The wire is that of SGLang's ``/init_weights_update_group``: a TCP store,
the group's name as prefix of its keys, the sender as rank 0.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world


def open_store(host: str, world_size: int, seconds: float) -> TCPStore:
    """Listen on a free port of ``host``; the store's ``port`` is to be told to the others.

    The store is made here and not by ``torch.distributed``'s rendezvous, which under torchrun makes rank 0 a client.
    """
    return TCPStore(host, 0, world_size, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def find_store(host: str, port: int, world_size: int, seconds: float) -> TCPStore:
    """Connect to a store that another process opened."""
    return TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=seconds))


class UpdateGroup:
    """A member's side of the group.

    Args:
        store: Shared by all members.
        name: The group's name, new in this process.
        rank: 0 for the sender.
        world_size: Members, the sender included.
        backend: ``gloo`` or ``nccl``.
        seconds: Longest time one operation may wait for the others.

    Raises:
        RuntimeError: Not all members joined in time.
    """

    def __init__(self, store: TCPStore, name: str, rank: int, world_size: int, backend: str, seconds: float) -> None:
        self.name = name
        self.world_size = world_size
        self._store = store  # lives as long as the group
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]  # a NewType of str
            timeout=timedelta(seconds=seconds),
        )
        _world.pg_group_ranks[group] = {index: index for index in range(world_size)}
        self._group: Any = group

    def broadcast(self, tensor: Tensor) -> None:
        """Send ``tensor`` as rank 0, or receive into it; contiguous, of the same shape and dtype everywhere."""
        dist.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        """Leave the group; what still waits in it fails."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
