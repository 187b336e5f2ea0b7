"""An environment that even a random model gets different rewards from."""

import os
import signal
from pathlib import Path
from typing import Any

from agentrl import Message, SingleTurnEnvironment


class Letters(SingleTurnEnvironment):
    """Reward: share of ASCII letters in the answer."""

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """The sum to add, as a text."""
        return [{"role": "user", "content": task["question"]}]

    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Count letters."""
        share = sum(c.isascii() and c.isalpha() for c in answer) / max(len(answer), 1)
        return share, {"accuracy": float(share > 0.5)}


class Pictures(Letters):
    """The same about one of four pictures of 56 x 56 pixels."""

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """A picture, and the sum."""
        from tests.tiny_vision import picture

        shown = picture(sum(task["question"].encode()) % 4, 56, 56)
        return [
            {"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": task["question"]}]}
        ]


class KillsItsProcess(Letters):
    """The same; one call of ``judge`` kills the process, as a crash in native code does.

    Args:
        folder: Folder in which the calls of all processes are counted.
        at: Number of the call that kills.
    """

    def __init__(self, folder: str, at: int) -> None:
        super().__init__()
        self._calls, self._at = Path(folder) / "calls", at

    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Count letters, or kill the process."""
        with open(self._calls, "ab", buffering=0) as file:
            file.write(b".")
        if self._calls.stat().st_size == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().judge(task, answer)
