"""Tries the connections between machines of trainer ranks before torch needs them.

Ranks talk to one another at ports that torch chooses. Where a firewall lets only some through, torch waits for ten
minutes and more, and names neither machine.

Guarantees: each machine of trainer ranks connects once to each other one, at a port that its kernel chose, as torch
does; the first of which that fails is named with both machines, the address and the port.
"""

import socket
from collections.abc import Mapping

from agentrl.launch.addresses import MachineError, why_unreachable
from agentrl.launch.machines import Machine

BACKLOG = 4096  # connections that the kernel takes for a process that does not look


class OpenPort:
    """A port of this machine that others try to connect to; nobody reads from it.

    Args:
        address: Address of this machine in the run's network.

    Raises:
        MachineError: It is no address of this machine.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(found[4][:2], family=found[0], backlog=BACKLOG)
        except OSError as error:
            raise MachineError(
                f"{socket.gethostname()} cannot listen at {address} for the other ranks ({error.strerror or error})"
            ) from error
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Closes the port."""
        self._socket.close()


def require_reach(others: Mapping[int, Machine]) -> None:
    """Connects to other machines of trainer ranks.

    Args:
        others: Their descriptions by ``launch.node_rank``; those without an open port are left out.

    Raises:
        MachineError: One cannot be reached from here.
    """
    for rank, machine in sorted(others.items()):
        why = why_unreachable(machine.address, machine.port) if machine.port else ""
        if why:
            raise MachineError(
                f"{socket.gethostname()} cannot connect to node {rank} ({machine.host}) at {machine.address}:"
                f"{machine.port} ({why}): ranks talk to one another at any port; open them between the two machines, "
                "or choose another network with launch.interface"
            )
