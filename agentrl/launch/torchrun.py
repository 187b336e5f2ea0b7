"""``torchrun`` as a child that dies with its parent: ``python -m agentrl.launch.torchrun [torchrun's own arguments]``.

Guarantees: when the launcher is gone, even by ``kill -9``, torchrun gets SIGTERM and takes its workers with it. A
worker's own traceback is the last thing in the log: torchrun's account of it is left out.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from agentrl.host.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    try:
        main()
    except ChildFailedError:
        sys.exit(1)
