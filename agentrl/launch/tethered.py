"""Runs a program that ends when its parent ends: ``python -m agentrl.launch.tethered PARENT_PID COMMAND...``.

Guarantees: the program replaces this process, so signals and exit codes are its own; when the parent ends, even by
``kill -9``, the kernel sends it SIGTERM.
"""

import os
import sys

from agentrl.host.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
