"""Runs ``torchrun`` so that it ends when its parent ends: ``python -m agentrl.launch.torchrun TORCHRUN_ARGUMENTS...``.

Guarantees: when the launcher ends, even by ``kill -9``, torchrun gets SIGTERM and ends its workers. A failed worker's
traceback is the end of the log, because torchrun's summary is left out. If a worker refused what the user asked for,
this process ends with the worker's exit code.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from agentrl.host.entry import REFUSED
from agentrl.host.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    try:
        main()
    except ChildFailedError as error:
        refused = any(failure.exitcode == REFUSED for failure in error.failures.values())
        sys.exit(REFUSED if refused else 1)
