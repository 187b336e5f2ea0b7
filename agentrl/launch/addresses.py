"""Addresses of this machine as others reach it, and connections to those of others."""

import os
import socket

import psutil

from agentrl.config.errors import UserError

PROBE_SECONDS = 5.0  # for a connection to another machine


class MachineError(UserError):
    """The machines of a run do not come together; the message says which, and why."""


def reach(address: str, port: int) -> str:
    """Tries to connect; returns which connection does not succeed, empty if it does."""
    why = why_unreachable(address, port)
    return f"{socket.gethostname()} cannot connect to {address}:{port} yet ({why})" if why else ""


def why_unreachable(address: str, port: int) -> str:
    """Tries to connect; returns why it does not succeed, empty if it does."""
    try:
        with socket.create_connection((address, port), timeout=PROBE_SECONDS):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def own_address(towards: str, interface: str | None = None) -> str:
    """Returns the address of this machine that others reach it at.

    Args:
        towards: Address of another machine, or of this one.
        interface: Name of the network interface to use; ``None`` for the one that leads to ``towards``.

    Raises:
        MachineError: There is no such interface, or it has no address; or ``towards`` is none that can be reached.
    """
    if interface is None:
        try:
            found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise MachineError(
                f"launch.head={towards}: {socket.gethostname()} finds no way to it ({error.strerror or error}); give "
                "the head's address, or a name that all machines know"
            ) from error
    known = psutil.net_if_addrs()
    for one in known.get(interface, ()):
        if one.family == socket.AF_INET:
            return one.address
    raise _no_interface(interface)


def _no_interface(interface: str) -> MachineError:
    return MachineError(
        f"launch.interface={interface}: {socket.gethostname()} has no such network interface with an address; it has "
        f"{', '.join(psutil.net_if_addrs())}"
    )


def interface_to(address: str) -> str | None:
    """Returns the name of the network interface that this machine reaches an address through; ``None`` if unknown.

    The collectives of torch take the address that the host's own name resolves to, often a loopback one, unless they
    are told an interface.
    """
    own = own_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            return name
    return None


def collective_env(address: str, interface: str | None = None) -> dict[str, str]:
    """Returns the environment variables that bind torch's collectives to the interface that reaches the head.

    Variables that are set already stay as they are.

    Raises:
        MachineError: There is no such interface, or no way to the head.
    """
    if interface is not None and interface not in psutil.net_if_addrs():
        raise _no_interface(interface)  # torch's own error names neither the key nor the machine
    name = interface or interface_to(address)
    wanted = () if name is None else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: str(name) for variable in wanted if variable not in os.environ}
