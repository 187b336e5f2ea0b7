"""Process that reads the episodes of shown runs into their indexes, so that the page never waits for it.

Guarantees: it ends when all is read, or with the process that started it; it yields the processor to others; the newest
episodes of each run are read before the process starts (:func:`read_newest`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.host.process import die_with_parent
from agentrl.view.episode_index import EpisodeIndex
from agentrl.view.shown_runs import ShownRun

NICENESS = 5
AT_ONCE = 20  # runs whose newest episodes are read before the page is there


def read_newest(runs: Sequence[ShownRun]) -> None:
    """Reads the newest episodes of the first runs, and what else their first pages need."""
    for run in runs[:AT_ONCE]:
        run.index.update(1)
        run.summary()


@contextmanager
def reading(runs: Sequence[ShownRun]) -> Iterator[None]:
    """Has another process read all episodes of the runs, while the block runs."""
    indexes = [f"{run.folder}\t{run.index.path.parent}" for run in runs]
    command = [sys.executable, "-m", "agentrl.view.index_process", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            process.stdin.write("\n".join(indexes))
            process.stdin.close()
            yield
        finally:
            process.terminate()


def main(parent_pid: int) -> None:
    """Read the runs that standard input names, one a line: the run's folder, a tab, the folder of its index."""
    die_with_parent(parent_pid)
    os.nice(NICENESS)
    waiting = []
    for line in sys.stdin.read().splitlines():
        folder, home = line.split("\t")
        waiting.append(EpisodeIndex(Path(folder), Path(home)))
    while waiting:
        waiting = [index for index in waiting if index.update(1)]


if __name__ == "__main__":
    main(int(sys.argv[1]))
