"""File of a run's episodes: one line each, and what is older packed beside it.

Guarantees: a line is in the file as a whole or not at all (:mod:`agentrl.core.whole_lines`). When the file has reached
a size, it becomes the next part in the folder of its name, in one step, and a process of low priority packs it
(:mod:`agentrl.rollout.packer`); the run never waits for that. A part that is not packed when the run ends, or
whose packing was killed, stays plain, is read like the others, and is packed with the next one.
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.core.packed_episodes import earlier_parts, parts_folder
from agentrl.core.whole_lines import WholeLines

log = logging.getLogger(__name__)
NICENESS = "19"
CLOSE_SECONDS = 120.0  # for the packing of the last part at the end of a run


class EpisodeLog:
    """Appends episodes to a file.

    Args:
        path: ``episodes.jsonl`` or ``eval-episodes.jsonl`` of a run.
        pack_after: Size in bytes at which the file becomes a packed part; ``None`` for never.
    """

    def __init__(self, path: Path, pack_after: int | None = None) -> None:
        self._path = path
        self._pack_after = pack_after
        self._lines = WholeLines(path)
        self._packing: subprocess.Popen[bytes] | None = None

    def add_all(self, lines: Sequence[bytes]) -> None:
        """Append lines, each of which ends with a line end."""
        self._lines.add_all(lines)
        if self._pack_after is not None and self._path.stat().st_size >= self._pack_after:
            self._begin_anew()

    def _begin_anew(self) -> None:
        folder = parts_folder(self._path)
        self._lines.close()
        try:
            folder.mkdir(exist_ok=True)
            last = max((int(part.stem) for part in earlier_parts(self._path)), default=-1)
            self._path.rename(folder / f"{last + 1:06d}.jsonl")
        except OSError as error:  # a full disk, say: the file stays as it is
            log.warning("%s is not packed: %s", self._path, error)
            self._pack_after = None
        self._lines = WholeLines(self._path)
        if self._packing is None or self._packing.poll() is not None:
            command = ["nice", "-n", NICENESS, sys.executable, "-m", "agentrl.rollout.packer", str(self._path)]
            self._packing = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """Close the file, and give a packing that goes on its time."""
        self._lines.close()
        if self._packing is not None:
            try:
                self._packing.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._packing.kill()
                self._packing.wait()
            self._packing = None
