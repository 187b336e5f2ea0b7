"""Controls one run from outside: starts the sandbox, sends it the order, limits its output, and ends it.

Guarantees: when :func:`execute` returns, raises or is cancelled, every isolated process is dead; at most the
allowed output is held in memory, however much is written. A run that does not report its end in time is killed.
"""

import asyncio
import codecs
import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any

from agentrl.rewards.sandbox.protocol import MEBIBYTE, Ended, Execution, Isolation, Limits, SandboxUnavailableError

SETUP_SECONDS = 60.0  # generous, for a machine under load
LEAVE_SECONDS = 5.0  # time for the supervisor to exit by itself, so that parents reap their processes
REPORT_CHARS = 4096  # more than the supervisor's marks and report on stderr
OPEN_FILES = 64  # per process; bounds kernel memory of sockets and pipes, which no other limit counts
CHUNK = 1 << 16
FAILED = "failed"  # the supervisor reports that the sandbox failed, not the command


@dataclass(frozen=True)
class Launch:
    """Command and options by which a backend starts one run.

    Attributes:
        command_line: Command to execute, which includes the supervisor.
        isolation: Isolation of the run.
        folder: Path of the working folder inside the sandbox.
        home: Path of the temporary folder that contains it.
        uid: User id that the supervisor changes to; ``None`` to keep its own.
        filter: Filter of system calls, as hexadecimal digits; empty for none.
        count_processes: Whether the kernel counts this run's processes separately.
        own_disk: Whether the temporary folder is a file system of this run alone.
        lifeline: Whether the supervisor can inherit a pipe from us.
        environment: Environment variables of the outermost process; none is visible inside.
        end: Ends the run if killing the outermost process is not enough.
    """

    command_line: tuple[str, ...]
    isolation: Isolation
    folder: str
    home: str
    uid: int | None = None
    filter: str = ""
    count_processes: bool = False
    own_disk: bool = True
    lifeline: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    end: Callable[[], Coroutine[Any, Any, None]] | None = None


class _Capture:
    """Keeps the start of a stream's text, and notes whether there was more."""

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.full = asyncio.Event()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._parts: list[str] = []
        self._chars = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(CHUNK):
            self._add(self._decode(chunk))
        self._add(self._decode(b"", True))

    def _add(self, text: str) -> None:
        kept = text[: self.max_chars - self._chars]
        self._chars += len(kept)
        self._parts.append(kept)
        if len(kept) < len(text):
            self.full.set()

    @property
    def text(self) -> str:
        return "".join(self._parts)


async def execute(
    launch: Launch, command: Sequence[str], files: Mapping[str, bytes], stdin: str, limits: Limits
) -> Execution:
    """Run a command in the sandbox of a ``launch``."""
    marks = secrets.token_hex(16), secrets.token_hex(16)
    started = time.perf_counter()
    out, err = _Capture(limits.output_chars), _Capture(limits.output_chars + REPORT_CHARS)
    lifeline, ours = os.pipe() if launch.lifeline else (None, None)
    try:
        process = await _spawn(launch, lifeline)
        order = _order(launch, command, files, limits, lifeline) | {"begin": marks[0], "end": marks[1]}
        run = asyncio.ensure_future(_communicate(process, (_encoded(order, files), stdin), out, err))
        full = [asyncio.ensure_future(capture.full.wait()) for capture in (out, err)]
        try:
            await asyncio.wait(
                {run, *full}, timeout=limits.seconds + SETUP_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            complete = run.done()
        finally:
            if ours is not None:
                os.close(ours)  # tells the supervisor to leave
                ours = None
            for waiting in full:
                waiting.cancel()
            await _end(process, run, launch)
    finally:
        for fd in (lifeline, ours):
            if fd is not None:
                os.close(fd)
    silent = Ended.KILLED if complete else Ended.TIMEOUT
    fallback = Execution("", "", None, silent, time.perf_counter() - started, launch.isolation)
    return _execution(fallback, out, err, limits, marks)


async def _spawn(launch: Launch, lifeline: int | None) -> asyncio.subprocess.Process:
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *launch.command_line,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(launch.environment),
            cwd="/",
            start_new_session=True,
            pass_fds=() if lifeline is None else (lifeline,),
        )
    )
    try:
        return await asyncio.shield(starting)
    except OSError as error:
        raise SandboxUnavailableError(f"the {launch.isolation} sandbox did not start: {error}") from error
    except asyncio.CancelledError:  # the start is shielded: a cancelled start could wait for ever
        process = await starting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if launch.end is not None:
            await launch.end()
        await process.communicate()
        raise


def _order(
    launch: Launch, command: Sequence[str], files: Mapping[str, bytes], limits: Limits, lifeline: int | None
) -> dict[str, Any]:
    rlimits = {
        "RLIMIT_AS": limits.memory_mb * MEBIBYTE,
        "RLIMIT_CPU": ceil(limits.cpu_seconds),
        "RLIMIT_FSIZE": limits.file_mb * MEBIBYTE,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 1,  # with 0 a core dump would still be piped to a handler outside, see core(5)
        "RLIMIT_MSGQUEUE": 0,
    }
    if launch.count_processes:
        rlimits["RLIMIT_NPROC"] = limits.processes + 1  # the supervisor counts too
    return {
        "command": list(command),
        "files": [(name, len(content)) for name, content in files.items()],
        "limits": asdict(limits),
        "rlimits": rlimits,
        "folder": launch.folder,
        "home": launch.home,
        "uid": launch.uid,
        "filter": launch.filter,
        "own_disk": launch.own_disk,
        "alone": launch.isolation is not Isolation.NONE,
        "lifeline": lifeline,
    }


def _encoded(order: dict[str, Any], files: Mapping[str, bytes]) -> bytes:
    line = json.dumps(order).encode()
    return b"".join((len(line).to_bytes(8, "big"), line, *files.values()))


async def _communicate(
    process: asyncio.subprocess.Process, sent: tuple[bytes, str], out: _Capture, err: _Capture
) -> None:
    assert process.stdin and process.stdout and process.stderr
    async with asyncio.TaskGroup() as group:
        feeding = group.create_task(_feed(process.stdin, sent[0] + sent[1].encode("utf-8", "surrogatepass")))
        reading = [group.create_task(out.read(process.stdout)), group.create_task(err.read(process.stderr))]
        await asyncio.wait(reading)  # both end when the last process that could write is dead
        feeding.cancel()
    await process.wait()


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the command need not read
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()


async def _end(process: asyncio.subprocess.Process, run: asyncio.Future[None], launch: Launch) -> None:
    """Wait a moment for the run to end by itself, then kill it."""
    try:
        if not run.done() and launch.end is None:
            await asyncio.wait({run}, timeout=LEAVE_SECONDS)
    finally:
        if not run.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if launch.end is not None:
                await launch.end()
            await asyncio.wait({run}, timeout=LEAVE_SECONDS)
            if run.cancel():  # without isolation, an escaped process may still hold our pipes
                await asyncio.wait({run})
    if not run.cancelled():
        run.result()


def _execution(silent: Execution, out: _Capture, err: _Capture, limits: Limits, marks: tuple[str, str]) -> Execution:
    """Build the result from the supervisor's report; without a report the result is ``silent``."""
    before, began, stderr = err.text.partition(f"{marks[0]}\n")
    if not began:
        said = before.strip()[-2000:] or "it said nothing"
        raise SandboxUnavailableError(f"the {silent.isolation} sandbox did not start: {said}")
    own, reported, report = stderr.rpartition(marks[1])
    execution = silent
    if reported:
        stderr = own
        told = json.JSONDecoder().raw_decode(report)[0]
        if told["ended"] == FAILED:
            raise SandboxUnavailableError(f"the {silent.isolation} sandbox failed: {told['problem']}")
        stderr += told["problem"] or ""
        ended = Ended(told["ended"])
        execution = replace(silent, exit_code=told["exit_code"], ended=ended, seconds=told["seconds"])
    if out.full.is_set() or len(stderr) > limits.output_chars:
        execution = replace(execution, exit_code=None, ended=Ended.OUTPUT)
    return replace(execution, stdout=out.text, stderr=stderr[: limits.output_chars])
