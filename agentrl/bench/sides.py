"""Runs each side of a benchmark in a process of its own, one task at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import psutil


class Side:
    """A process that runs tasks and answers each with one line.

    Args:
        module: Module to run with ``python -m``; it calls :func:`answer` once at its start and once for each task.
        arguments: Command-line arguments of the module.
        env: Environment variables to add.
    """

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.name = f"{module} {' '.join(arguments)}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(env or {}),
        )

    def do(self, task: Any) -> dict[str, Any]:
        """Send a task to the process and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Read the next answer, and skip lines that libraries print.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the process so far, of all its threads."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def answer(**values: Any) -> None:
    """Sends an answer to the parent process; called in the side's process."""
    print("@" + json.dumps(values), flush=True)


def requests() -> Iterator[Any]:
    """Yields the tasks of the parent process; called in the side's process."""
    for line in sys.stdin:
        yield json.loads(line)
