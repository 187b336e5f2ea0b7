"""Runs untrusted code, such as code that a model wrote, in a sandbox.

Guarantees of every isolation but ``none``: the code sees no environment variable, no process, no network and no file of
this machine except system programs, Python's standard library and the requested files, all read-only; it can
create only local sockets; when the call returns or is cancelled, no process or file of it is left. If our
process is killed, bubblewrap and namespaces end at once, a container when its wall time is over.

How each limit is enforced:

============  =====================  ==========================================  ====================
Limit         bubblewrap             namespaces                                  docker, podman
============  =====================  ==========================================  ====================
seconds       by process 1 inside; from outside if that process does not respond
cpu_seconds   kernel, for each process; the sum is checked every 50 ms
memory_mb     kernel, for each process; the sum, with temporary files, is        kernel (cgroup)
              checked every 50 ms
disk_mb       kernel (tmpfs, in memory; nothing is written to the machine's disk)
file_mb       kernel
processes     kernel                 kernel                                      kernel (cgroup)
output_chars  from outside; one character more ends the run
============  =====================  ==========================================  ====================

So without a cgroup one process never gets more than ``memory_mb``; several together can exceed it only by what they
allocate in 50 ms, and never exceed ``processes`` x ``memory_mb``. Kernel memory of sockets and pipes is not counted; it
is bounded by 64 open files per process. For an ordinary user on Linux before 5.14 the kernel counts all processes of
that user, so the code can fork fewer processes than ``processes`` allows, or none.

``none`` enforces the limits per process, checks the sums, and ends all descendants of the command. It does not stop the
code from reading files, connecting, or killing processes, and has no ``disk_mb``.

The code can still see machine facts in ``/proc`` (memory, load, kernel version, paths of the visible folders), the
time, and how busy the machine is. It shares the kernel, as in every container: a kernel bug can break the isolation.
"""

from agentrl.rewards.sandbox.choose import make_sandbox
from agentrl.rewards.sandbox.protocol import Ended, Execution, Isolation, Limits, Sandbox, SandboxUnavailableError

__all__ = ["Ended", "Execution", "Isolation", "Limits", "Sandbox", "SandboxUnavailableError", "make_sandbox"]
