"""Runs a command on a terminal of some size."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end import SECONDS, command, environment


def on_terminal(
    arguments: Sequence[str], columns: int, cwd: Path, rows: int = 24, typed: Sequence[str] = (), prompt: str = "you: "
) -> list[str]:
    """Run ``agentrl ARGUMENTS`` and return the lines that its terminal shows.

    Args:
        arguments: Arguments of the command.
        columns: Width of the terminal.
        cwd: Working folder.
        rows: Height of the terminal.
        typed: Lines that a person types, one at each prompt.
        prompt: Text that ends the output while a line is awaited.
    """
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        command(*arguments), stdin=its, stdout=its, stderr=its, cwd=cwd, env=env | {"TERM": "xterm"},
        start_new_session=True,
    )  # fmt: skip
    os.close(its)
    waiting, shown, answered = list(typed), "", 0
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if select.select([mine], [], [], 0.2)[0]:
            try:
                shown += os.read(mine, 65536).decode(errors="replace")
            except OSError:  # the child has closed the terminal
                break
        plain = _plain(shown)
        if waiting and plain.endswith(prompt) and len(plain) > answered:
            answered = len(plain)
            os.write(mine, waiting.pop(0).encode() + b"\n")
    child.wait(SECONDS)
    os.close(mine)
    return [line.rstrip() for line in _plain(shown).splitlines()]


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
