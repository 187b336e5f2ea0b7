"""Writes checkpoints beside training, by DCP's ``async_save``: a step waits for a copy in memory, not for the disk.

Guarantees: what is written is the state at the call, whatever training changes meanwhile; a folder named ``step-N`` is
complete and on the disk (its files are synced, and it is renamed into place last), so a process killed in a save leaves
the checkpoint before it as it was, and the next save removes the rest; one of the same step is replaced, and there is
always one of the two; older checkpoints are removed only after the new one is complete. One save at a time: the next
one waits for it. A failure on one rank is raised on every rank, by :meth:`CheckpointSaver.settle` or the next save.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.serialization import set_crc32_options

from agentrl.train.checkpoint_state import REPLACED, STATE_FILE
from agentrl.train.random_state import save_random_state

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

    def save(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], files: Mapping[str, bytes] | None = None
    ) -> Path:
        """Copy the tensors and start to write ``step-N``; a collective.

        Args:
            step: Number of trainer steps done.
            tensors: State dict, nested, of tensors (sharded or not) and plain values.
            state: Other state, as JSON; rank 0's is written.
            files: Name -> content of further files; rank 0's are written.

        Returns:
            The folder, which is there when the save is complete.

        Raises:
            CheckpointFailed: The save before this one failed, or this one cannot begin.
        """
        start = time.monotonic()
        self.settle()
        if self._group is None:
            made = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_SECONDS))
            assert isinstance(made, dist.ProcessGroup)  # an int only for ranks outside of it
            self._group = made
        partial, target = self._folder / f"{PARTIAL}step-{step:06d}", self._folder / f"step-{step:06d}"
        self._names = dist.get_rank() == 0
        with _Together() as begun:
            if self._names:
                for left in self._folder.glob(f"{PARTIAL}step-*"):  # of a run that was killed
                    shutil.rmtree(left, ignore_errors=True)
                partial.mkdir(parents=True)
                write(partial, {**(files or {}), STATE_FILE: json.dumps(state).encode()})
        self._check(begun, partial)
        with _Together() as drawn:
            sync(save_random_state(partial, dist.get_rank(), dist.get_world_size()))
        self._check(drawn, partial)
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
        return target

    def _check(self, part: "_Together", partial: Path) -> None:
        """Gives a save up if a part of it failed on some rank.

        Raises:
            CheckpointFailed: It did.
        """
        if part.failed() and self._names:
            shutil.rmtree(partial, ignore_errors=True)
        part.check()

    def settle(self) -> bool:
        """Wait until the latest save is complete on all ranks; a collective.

        Returns:
            Whether there was one since the last call.

        Raises:
            CheckpointFailed: It failed on one of them.
        """
        if self._written is None:
            return False
        with _Together() as complete:
            self.wait()
        complete.check()
        return True

    def wait(self, seconds: float = SAVE_SECONDS) -> None:
        """Wait until this rank's part of the latest save is complete.

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
                commit(partial, target)
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


class _Together:
    """Runs a part of a collective in which some ranks may fail; afterwards every rank knows whether one did."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._reasons: list[str] | None = None

    def __enter__(self) -> "_Together":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._error = error
        return isinstance(error, OSError | CheckpointFailed)

    def failed(self) -> list[str]:
        """Returns why it failed on the ranks on which it did; a collective the first time."""
        if self._reasons is None:
            found: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(found, None if self._error is None else _reason(self._error))
            self._reasons = [reason for reason in found if reason is not None]
        return self._reasons

    def check(self) -> None:
        """Raises on every rank if one of them failed.

        Raises:
            CheckpointFailed: A rank failed.
        """
        if self.failed():
            raise CheckpointFailed(self.failed()[0]) from self._error


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files, and waits until they are on the disk."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
        sync(folder / name)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit(partial: Path, target: Path) -> None:
    """Gives a complete checkpoint its name; one of the same step is replaced, and there is always one of the two."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """The failure of the first rank that failed, in one line."""
    if isinstance(error, CheckpointFailed):
        return str(error)
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {_reason(first)}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints."""
    checkpoints = sorted(p for p in folder.glob("step-*") if p.is_dir())
    for old in [*checkpoints[:-keep], *folder.glob(f"{REPLACED}*")]:
        shutil.rmtree(old, ignore_errors=True)
