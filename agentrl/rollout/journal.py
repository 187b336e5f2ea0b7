"""Append-only journal of what became of every admitted group, and the files of episodes.

Guarantees: one record for each admitted group and one for its end, with the step that counts it: the step that trains
it, or the next one after its end. Each line has a checksum (:mod:`agentrl.rollout.journal_lines`); lines are written in
order, and :meth:`Journal.cut` returns when all lines before it are on the disk. A resumed run goes on from a cut: its
first record voids all records behind it, and the ends of the groups that it admits again. Records that a full disk
refuses are kept and written later, in order; a cut fails as long as there are any.
:mod:`agentrl.rollout.journal_proof` reads the file.

Each episode is written once, as one JSON line of another file in the same folder, whatever line ends its texts hold:
with its task, all conversations of all roles, and a message that several conversations share once. One whose messages
cannot be written as JSON becomes a failed episode with the reason. Where the disk is full, episodes are left out of
the file; the log says so once. :func:`read_episodes` reads the file.
"""

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic_core import PydanticSerializationError

from agentrl.core.episode import Episode, StopReason
from agentrl.core.packed_episodes import all_lines
from agentrl.core.sent_episode import SentEpisode
from agentrl.core.writer_thread import AtOnce, Writer
from agentrl.rollout.episode_log import EpisodeLog
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal_lines import FILE, JournalError, Position, read_journal, seal

log = logging.getLogger(__name__)
_LINE_ENDS = {one: f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}  # that JSON allows inside a text
GroupOutcome = Literal["trained", "filtered", "failed", "cancelled", "stale"]
OWNER_SECONDS = 20.0  # for the end of a controller that wrote this journal before; its launcher may have been killed
POLL_SECONDS = 0.2


class Journal:
    """Append-only journal of a run.

    Args:
        run_dir: Folder of the run, ``runs/<name>``.
        episodes: Whether to also write ``episodes.jsonl`` and ``eval-episodes.jsonl``.
        pack_after: Size in bytes at which these become packed parts; ``None`` for never.
        writer: Writes records and episodes, of which it has none left when the journal is closed; by default they are
            written at once.
    """

    def __init__(
        self, run_dir: Path, *, episodes: bool, pack_after: int | None = None, writer: Writer | None = None
    ) -> None:
        self._run_dir = run_dir
        self._with_episodes = episodes
        self._pack_after = pack_after
        self._writer = writer or AtOnce()
        self._episodes: dict[str, EpisodeLog] = {}
        self._file: BinaryIO | None = None
        self._end = Position()
        self._refused = b""  # whole or begun lines that the disk had no room for; the writer's alone

    def own(self, seconds: float = OWNER_SECONDS) -> None:
        """Keep every other process from writing the journal until this one ends.

        Raises:
            JournalError: Another process still writes it after ``seconds``.
        """
        file, deadline = self._opened(), time.monotonic() + seconds
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise JournalError(f"another process writes {self._run_dir / FILE}") from error
            except OSError as error:  # a file system without locks: the launcher's record of the owner is all there is
                return log.warning("%s cannot be locked: %s", self._run_dir / FILE, error)
            time.sleep(POLL_SECONDS)

    def admitted(self, *, draw: int, task: str, seed: int, version: int) -> None:
        """Record that a group was admitted.

        Args:
            draw: Draw index of its task.
            task: Id of its task.
            seed: Seed of the group's first member, from which a repeated group can be told.
            version: Policy version served at that time.
        """
        self._append({"outcome": "admitted", "draw": draw, "task": task, "seed": seed, "version": version})

    def group(self, outcome: GroupOutcome, *, draw: int, task: str, step: int, reason: str | None = None) -> None:
        """Record how a group ended.

        Args:
            outcome: How it ended.
            draw: Draw index of its task.
            task: Id of its task.
            step: Trainer step that counts the group, from 0.
            reason: Reason for an outcome other than trained.
        """
        record = {"outcome": outcome, "draw": draw, "task": task, "step": step}
        self._append(record if reason is None else {**record, "reason": reason})

    async def cut(self, step: int) -> Position:
        """Record that a checkpoint after ``step`` steps is taken here, and wait until all records are on the disk.

        What the journal's writer was given before is in its files then, too. The disk is waited for in a thread: a busy
        one takes seconds, and episodes go on meanwhile. What is appended meanwhile stands behind the position.

        Returns:
            The position after the record, for :meth:`resumed`.

        Raises:
            RolloutError: The disk is full.
        """
        self._append({"outcome": "checkpoint", "step": step})
        position, own = self._end, os.dup(self._opened().fileno())  # the journal may be closed meanwhile

        def wait() -> None:
            try:
                self._writer.flush()
                if self._refused:
                    raise RolloutError(f"{self._run_dir / FILE} cannot be written: the disk is full")
                os.fsync(own)
            finally:
                os.close(own)

        await asyncio.to_thread(wait)
        return position

    def resumed(self, step: int, position: Position, *, again: Sequence[int], held: Sequence[int]) -> None:
        """Void the records behind a cut, and the ends of the groups that go on.

        Args:
            step: Number of trainer steps before the cut.
            position: Position of the cut.
            again: Draw indices of the groups that run again; their admissions are void too.
            held: Draw indices of the finished groups of the checkpoint that no step has counted.

        Raises:
            JournalError: The journal does not hold the cut, or is damaged.
        """
        self._opened()
        found = read_journal(self._run_dir / FILE)
        if position.lines and found.checksums[position.lines - 1 : position.lines] != [position.crc]:
            raise JournalError(
                f"{self._run_dir / FILE} does not belong to the checkpoint after step {step}: that was taken at line "
                f"{position.lines}, and the file has {len(found.checksums)} lines"
            )
        goes_on = {"again": list(again), "held": list(held)}
        self._append({"outcome": "resumed", "step": step, "line": position.lines, **goes_on})

    def episode(self, episode: Episode, *, evaluation_step: int | None = None) -> Episode:
        """Append an episode to the training or evaluation episodes file, if enabled.

        Returns:
            The episode as it was recorded: a failed one if it could not be written.
        """
        if not self._with_episodes:
            return episode
        episode, line = as_line(episode)
        extra = "" if evaluation_step is None else f'"eval_step":{evaluation_step},'
        name = "episodes.jsonl" if evaluation_step is None else "eval-episodes.jsonl"
        if name not in self._episodes:
            self._episodes[name] = EpisodeLog(self._run_dir / name, self._pack_after)
        data = ("{" + extra + line[1:] + "\n").encode()
        self._writer.add(self._episodes[name].add_all, data, len(data))
        return episode

    def _append(self, record: dict[str, Any]) -> None:
        self._opened()
        line, crc = seal(record, self._end.crc)
        self._end = Position(self._end.lines + 1, crc)
        self._writer.add(self._write, line)

    def _write(self, lines: list[bytes]) -> None:
        file, left = self._opened(), self._refused + b"".join(lines)
        try:
            while left:
                left = left[file.write(left) or 0 :]
        except OSError as error:
            if not self._refused:
                log.warning("%s cannot be written now: %s", self._run_dir / FILE, error)
        self._refused = left

    def _opened(self) -> BinaryIO:
        """Returns the journal's file; when it is opened, a last line that was cut is removed."""
        if self._file is None:
            path = self._run_dir / FILE
            found = read_journal(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
            self._file.truncate(found.size)
            self._end = found.end
        return self._file

    def close(self) -> None:
        """Close the files; what a full disk refused until now is written if there is room, else its loss is said."""
        if self._file is not None:
            self._write([])
            if self._refused:
                lost = len(self._refused)
                log.error("%s lacks its last %d bytes, for which the disk had no room", self._run_dir / FILE, lost)
            self._file.close()
            self._file = None
        for file in self._episodes.values():
            file.close()
        self._episodes.clear()


def as_line(episode: Episode) -> tuple[Episode, str]:
    """Returns an episode as it is recorded, a failed one if it cannot be written as JSON, and its line of a file."""
    if isinstance(episode, SentEpisode):
        return episode, episode.line
    try:
        return episode, _line(episode)
    except (PydanticSerializationError, RecursionError) as error:  # an object of user code in a message, say
        episode = _without_messages(episode, f"the episode cannot be written as JSON: {error}")
        log.warning("task %s: %s", episode.task_id, episode.error)
        return episode, _line(episode)


def _line(episode: Episode) -> str:
    said = {role: one.shortened() for role, one in episode.trajectories.items()}
    episode = episode.model_copy(update={"trajectories": said})
    try:
        line = episode.model_dump_json()
    except PydanticSerializationError:  # a row may hold what is no JSON, an image, say; messages may not
        task = json.loads(json.dumps(episode.task, default=repr))
        line = episode.model_copy(update={"task": task}).model_dump_json()
    for end, escape in _LINE_ENDS.items():
        line = line.replace(end, escape)
    return line


def _without_messages(episode: Episode, error: str) -> Episode:
    """Returns a failed episode in the place of one that cannot be written."""
    names = ("group_id", "task_id", "index", "seed", "tag", "seconds", "abandoned", "started", "version", "attempt")
    kept = {name: getattr(episode, name) for name in (*names, "sampling")}
    return Episode(**kept, stop_reason=StopReason.ENVIRONMENT_ERROR, error=error)


def read_episodes(path: Path) -> Iterator[Episode]:
    """Reads the episodes of a run or an evaluation, in the order in which they ended.

    Parts that were packed meanwhile come first. A line that was not written to its end is skipped.

    Args:
        path: ``episodes.jsonl`` or ``eval-episodes.jsonl`` of a run's folder.
    """
    for line in all_lines(path):
        found = json.loads(line)
        found.pop("eval_step", None)
        yield Episode.model_validate(found)
