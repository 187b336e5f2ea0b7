"""Writes checkpoints beside training, by DCP's ``async_save``: a step waits for a copy in memory, not for the disk.

Guarantees: what is written is the state at the call, whatever training changes meanwhile; a folder named ``step-N`` is
complete (it is renamed into place last), so a process killed in a save leaves the checkpoint before it as it was, and
the next save removes the rest; older checkpoints are removed only after the new one is complete. One save at a time:
the next one waits for it. A failure is raised by the next call on every rank, at the latest by :meth:`wait` at the
end of the run.
"""

import json
import shutil
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.serialization import set_crc32_options

from agentrl.train.checkpoint_state import STATE_FILE

PARTIAL = ".partial-"
SAVE_SECONDS = 3600.0  # longest wait for a save: of 1 TB at 300 MB/s
END_SECONDS = 5.0  # the same at the end of a run that failed or was stopped
set_crc32_options(False)  # 6 times the processor time of the rest of a save, and torch.load never reads it


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; the message says why, and which one is the newest."""


class CheckpointSaver:
    """Saves the checkpoints of a run; all ranks call each method together.

    Args:
        folder: Folder of the run's checkpoints.
        keep: Number of newest checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._group: dist.ProcessGroup | None = None  # of its own: its collectives run beside those of training
        self._written: Future[None] | None = None
        self._names = False  # whether this rank makes, names and removes folders
        self.stall: float | None = None  # seconds that the latest save kept the caller, until someone takes them

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """Copy the tensors and start to write ``step-N``; a collective.

        Args:
            step: Number of trainer steps done.
            tensors: State dict, nested, of tensors (sharded or not) and plain values.
            state: Other state, as JSON; rank 0's is written.

        Raises:
            CheckpointFailed: The save before this one failed.
            OSError: The folder cannot be written (on rank 0).
        """
        start = time.monotonic()
        self.wait()
        if self._group is None:
            made = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_SECONDS))
            assert isinstance(made, dist.ProcessGroup)  # an int only for ranks outside of it
            self._group = made
        partial, target = self._folder / f"{PARTIAL}step-{step:06d}", self._folder / f"step-{step:06d}"
        self._names = dist.get_rank() == 0
        if self._names:
            for left in self._folder.glob(f"{PARTIAL}step-*"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / STATE_FILE).write_text(json.dumps(state))
        dist.barrier(self._group)
        upload = async_save(
            tensors,
            checkpoint_id=str(partial),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        assert isinstance(upload, Future)
        self._written = Future()
        threading.Thread(
            target=self._finish, args=(upload, partial, target, self._written), name="checkpoint", daemon=True
        ).start()
        self.stall = time.monotonic() - start

    def check(self) -> None:
        """Raise if the latest save has failed.

        Raises:
            CheckpointFailed: With the reason.
        """
        if self._written is not None and self._written.done():
            self.wait()

    def wait(self, seconds: float = SAVE_SECONDS) -> None:
        """Wait until the latest save is complete.

        Raises:
            CheckpointFailed: It failed, or is not complete after ``seconds``.
        """
        written, self._written = self._written, None  # what it raises is told once
        if written is not None:
            try:
                written.result(seconds)
            except TimeoutError as error:
                raise CheckpointFailed(
                    f"a checkpoint in {self._folder} was not written within {seconds:g} s"
                ) from error

    def _finish(self, upload: "Future[Any]", partial: Path, target: Path, written: "Future[None]") -> None:
        """Make a written checkpoint count; in its own thread, whose end ``written`` tells, with any failure."""
        error = upload.exception()
        try:
            if error is None and self._names:
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
                prune(self._folder, self._keep)
        except OSError as failed:
            error = failed
        if error is None:
            written.set_result(None)
            return
        shutil.rmtree(partial, ignore_errors=True)
        newest = max((one.name for one in self._folder.glob("step-*")), default="none")
        written.set_exception(
            CheckpointFailed(f"{target} could not be written; the newest checkpoint is {newest}: {_reason(error)}")
        )


def _reason(error: BaseException) -> str:
    """The failure of the first rank that failed, in one line."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}"


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints."""
    checkpoints = sorted(p for p in folder.glob("step-*") if p.is_dir())
    for old in checkpoints[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
