"""Builds the filter of system calls for the code in a sandbox.

Guarantees: the code can create only local sockets (in its own empty network), and cannot trace or read another
process, create or enter namespaces, use the kernel's key rings, read the kernel's log, or allocate memory that no limit
counts (``memfd``, System V shared memory). Namespaces and dropped privileges forbid most of this already, but not all:
``AF_VSOCK`` reaches the host of a virtual machine from every network namespace, and sockets opened by io_uring bypass
the filter.

How: a classic BPF program, installed with ``prctl`` by the first process inside; no library is needed.
"""

import errno
import os
import struct

from agentrl.rewards.sandbox.protocol import SandboxUnavailableError

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
X32 = 0x40000000  # x86-64 has every call a second time above this number
AF_UNIX = 1
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS and NEWCGROUP

# machine: (architecture number in struct seccomp_data, system call numbers)
ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "shmget": 29, "socket": 41, "clone": 56, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
            "add_key": 248,
            "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304,
            "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "memfd_create": 319,
            "bpf": 321, "userfaultfd": 323,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "unshare": 97, "syslog": 116, "ptrace": 117, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198,
            "add_key": 217,
            "request_key": 218, "keyctl": 219, "clone": 220, "perf_event_open": 241, "open_by_handle_at": 265,
            "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "memfd_create": 279,
            "bpf": 280, "userfaultfd": 282,
        },
    ),
}  # fmt: skip
# newer system calls have the same number on every architecture
EVERYWHERE = {"io_uring_setup": 425, "clone3": 435, "pidfd_getfd": 438, "memfd_secret": 447}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _instruction(RETURN, REFUSE | number)


def syscall_filter(machine: str | None = None) -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Args:
        machine: Architecture, as ``uname -m`` prints it; ``None`` is this machine's.

    Raises:
        SandboxUnavailableError: The system call numbers of ``machine`` are not known.
    """
    machine = machine or os.uname().machine
    if machine not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise SandboxUnavailableError(f"no filter of system calls for {machine} (there is one for {known})")
    architecture, numbers = ARCHITECTURES[machine]
    numbers = numbers | EVERYWHERE
    program = [
        _instruction(LOAD, ARCHITECTURE_AT),
        _instruction(JUMP_EQUAL, architecture, 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER_AT),
        _instruction(JUMP_GREATER_EQUAL, X32, 0, 1),
        _refuse(errno.ENOSYS),
    ]
    for name in sorted(numbers.keys() - {"socket", "clone", "clone3"}):
        program += [_instruction(JUMP_EQUAL, numbers[name], 0, 1), _refuse(errno.EPERM)]
    # clone3 passes its flags in memory, which a filter cannot read; without it the C library falls back to clone
    program += [_instruction(JUMP_EQUAL, numbers["clone3"], 0, 1), _refuse(errno.ENOSYS)]
    program += [
        _instruction(JUMP_EQUAL, numbers["socket"], 0, 4),
        _instruction(LOAD, FIRST_ARGUMENT_AT),
        _instruction(JUMP_EQUAL, AF_UNIX, 1, 0),
        _refuse(errno.EACCES),
        _instruction(RETURN, ALLOW),
        _instruction(JUMP_EQUAL, numbers["clone"], 0, 3),
        _instruction(LOAD, FIRST_ARGUMENT_AT),
        _instruction(JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1),
        _refuse(errno.EPERM),
        _instruction(RETURN, ALLOW),
    ]
    return b"".join(program)
