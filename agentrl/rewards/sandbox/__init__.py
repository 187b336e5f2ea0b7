"""Running code that nobody has read: what a model wrote, for a reward.

Guarantees of every isolation but ``none``: the code sees no environment variable, no process, no network and no file of
this machine except the system's programs, Python's standard library and what was asked for, all read-only; it cannot
make a socket other than a local one; and when the call returns, also by cancellation, nothing of it is left. If our
process is killed, bubblewrap and namespaces end at once, a container when its wall time is over.

How hard the limits are:

============  =====================  ==========================================  ====================
Limit         bubblewrap             namespaces                                  docker, podman
============  =====================  ==========================================  ====================
seconds       kept by process 1 inside, and from outside should that one fall silent
cpu_seconds   kernel, for each process; the sum is looked at every 50 ms
memory_mb     kernel, for each process; the sum, with temporary files, is        kernel (cgroup)
              looked at every 50 ms
disk_mb       kernel (tmpfs, in memory; nothing is written on the machine's disk)
file_mb       kernel
processes     kernel                 kernel                                      kernel (cgroup)
output_chars  from outside; one character more ends the run
============  =====================  ==========================================  ====================

Without a cgroup, then, one process never gets more than ``memory_mb``, and several get more together only as far as
they fill in 50 ms; ``processes`` x ``memory_mb`` is the bound that nothing passes. What the kernel holds for sockets
and pipes is not counted, and bounded by 64 open files for each process. As an ordinary user on Linux before 5.14 the
kernel counts all processes of that user, so that the code can fork less than ``processes`` says, or not at all.

``none`` keeps the limits of a process, looks at the sums, and ends what descends from the command; it keeps nobody
from reading, connecting, or killing, and has no ``disk_mb``.

Not kept from the code: machine facts in ``/proc`` (memory, load, kernel version, where the shown folders lie), the
time, and how busy the machine is. The kernel is shared, as in every container: a flaw in it is a way out.
"""

from agentrl.rewards.sandbox.choose import make_sandbox
from agentrl.rewards.sandbox.protocol import Ended, Execution, Isolation, Limits, Sandbox, SandboxUnavailableError

__all__ = ["Ended", "Execution", "Isolation", "Limits", "Sandbox", "SandboxUnavailableError", "make_sandbox"]
