"""Follows README and the pages on environments and agents in a fresh clone, on a terminal of 80 x 24.

    git clone . /tmp/fresh/agentrl && python scripts/first_hour.py /tmp/fresh/agentrl docs/first_hour.txt

The second argument gets what the terminal showed; pages of the checkout may follow it. README is followed in the
checkout, the others in an empty folder beside it. It needs ``pip install pyte``, a terminal in Python, which interprets
what the live view draws. Commands are taken from the pages themselves, with the files that they describe; runs that are
no part of the start, nor of the environment that is written, get ``trainer.total_steps=2``, and commands that are no
step of a first hour (GPUs, servers of one's own, the tests) are left out.
"""

import fcntl
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyte

COLUMNS, ROWS = 80, 24
PROMPT = "first-hour> "
SHORT = " trainer.total_steps=2 eval.tasks=8"
LEFT_OUT = re.compile(r"base-url|serve |gpu|chat |model.name=runs|group_size=16|make test|nproc=4")
WHOLE = ("agentrl recipe run arithmetic_grpo", "agentrl recipe run calculator_grpo", "agentrl recipe run my_shop_grpo")
PAGES = ("README.md", "docs/environments.md", "docs/agents.md")
PLAYED = {"env play my_shop": ['/cost {"item": "pen", "count": 3}', "6"], "env play my_env.py": ["TEA"]}


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yields each fenced block of a page: its language, its text, and the prose before it."""
    text, end = page.read_text(), 0
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        yield found[1], found[2], text[end : found.start()]
        end = found.end()


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """Yields ``("file", name)`` with its text behind a newline, and ``("run", command)``, in the page's order."""
    for language, text, before in blocks(page):
        named = re.findall(r"`((?:envs/|agents/)?\w+\.py)`", before)
        if language == "python" and named and "class " in text:
            yield "file", f"{named[-1]}\n{text}"
        if language != "sh":
            continue
        for line in text.splitlines():
            command = re.sub(r"\s+# .*", "", line).strip()
            if not command or LEFT_OUT.search(command):
                continue
            if command.startswith("agentrl recipe run") and command not in WHOLE and "--dry-run" not in command:
                command += SHORT
            yield "run", command


class Terminal:
    """A shell on a terminal whose screen is interpreted.

    Args:
        folder: Working folder.
    """

    def __init__(self, folder: Path) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=100_000, ratio=0.5)
        self.stream = pyte.ByteStream(self.screen)
        self.mine, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "USER")}
        env |= {"PIP_QUIET": "2", "TERM": "xterm-256color", "PS1": PROMPT, "LC_ALL": "C.UTF-8"}
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile"], stdin=its, stdout=its, stderr=its, cwd=folder, env=env,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(its)
        self._until(PROMPT)

    def run(self, command: str, typed: list[str]) -> tuple[str, int, float]:
        """Types a command and what it asks for; returns what the terminal showed, the exit code and the seconds."""
        self.screen.reset()
        self.screen.history.top.clear()
        began = time.monotonic()
        os.write(self.mine, command.encode() + b"\n")
        for answer in typed:
            self._until("you: ")
            os.write(self.mine, answer.encode() + b"\n")
        self._until(PROMPT)
        seconds, shown = time.monotonic() - began, self._text()
        self.screen.reset()
        self.screen.history.top.clear()
        os.write(self.mine, b"echo code $?\n")
        self._until(PROMPT)
        return shown, int(re.findall(r"code (\d+)", self._text())[-1]), seconds

    def _text(self) -> str:
        kept = ["".join(line[x].data for x in range(COLUMNS)).rstrip() for line in self.screen.history.top]
        lines = [line.rstrip() for line in [*kept, *self.screen.display]]
        while lines and lines[-1] in ("", PROMPT.rstrip()):
            lines.pop()
        return "\n".join(lines)

    def _until(self, text: str) -> None:
        """Reads until the cursor stands behind ``text`` and nothing more comes."""
        while True:
            if select.select([self.mine], [], [], 0.5)[0]:
                self.stream.feed(os.read(self.mine, 65536))
                continue
            line = self.screen.display[self.screen.cursor.y][: self.screen.cursor.x]
            if line.endswith(text):
                return


def main(checkout: Path, output: Path, pages: Sequence[str]) -> None:
    """Runs all steps and writes the transcript as it grows."""
    terminal, failed, done = Terminal(checkout), [], set()
    with output.open("w") as kept:

        def run(command: str) -> None:
            typed = next((lines for name, lines in PLAYED.items() if name in command), [])
            shown, code, seconds = terminal.run(command, typed)
            echoed = math.ceil(len(command) / COLUMNS)  # lines of the command itself; the prompt was wiped
            lines = [line for line in shown.splitlines()[echoed:] if not line.endswith(PROMPT.rstrip())]
            body = "\n".join(lines).replace(str(Path.home()), "~")
            kept.write(f"\n$ {command}\n{body}\n[exit {code}, {seconds:.1f} s]\n")
            kept.flush()
            if code:
                failed.append(command)

        kept.write(f"{(__doc__ or '').split(chr(10))[0]}\nCommands that are long in the pages ran with{SHORT}.\n")
        empty = checkout.parent / "empty"
        empty.mkdir(exist_ok=True)
        if (checkout / ".venv").is_dir():
            run(". .venv/bin/activate")
        for page in pages:
            folder = checkout if page == "README.md" else empty
            kept.write(f"\n==== {page} ====\n")
            run(f"cd {os.path.relpath(folder, checkout)}")
            for kind, what in steps(checkout / page):
                if kind == "file":
                    name, text = what.split("\n", 1)
                    target = folder / name
                    target.parent.mkdir(exist_ok=True)
                    if not target.exists():
                        target.write_text(text)
                        kept.write(f"\n[{name} written as the page says]\n")
                    continue
                if what in done:
                    continue
                done.add(what)
                run(what)
                if what == "make venv":
                    run(". .venv/bin/activate")
        kept.write(f"\ncommands that did not end with 0: {failed or 'none'}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:] or PAGES)
