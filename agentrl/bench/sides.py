"""Sides of a benchmark as processes of their own, each doing one task at a time when told to."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any


class Side:
    """A process that answers tasks.

    Args:
        module: Run with ``python -m``; answers by :func:`answer`, one line for the start and one for each task.
        arguments: Command-line arguments of the module.
        env: Added to the environment.
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
        """Read the next answer, and skip what libraries print.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def answer(**values: Any) -> None:
    """In a side: one line to the parent."""
    print("@" + json.dumps(values), flush=True)


def requests() -> Iterator[Any]:
    """In a side: lines from the parent."""
    for line in sys.stdin:
        yield json.loads(line)
