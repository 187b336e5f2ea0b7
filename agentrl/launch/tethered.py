"""A program as a child that dies with us: ``python -m agentrl.launch.tethered PARENT COMMAND...``.

Guarantees: the program takes this process's place, so signals and exit codes are its own; when the parent is gone, even
by ``kill -9``, the kernel sends it SIGTERM.
"""

import os
import sys

from agentrl.host.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
