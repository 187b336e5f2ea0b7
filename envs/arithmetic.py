"""Sums of two small numbers: the environment of the learning proof.

Guarantees: reward 1.0 where the last integer of the answer is the sum, else 0.0.
"""

import re
from typing import Any

from agentrl import Message, SingleTurnEnvironment

_INTEGER = re.compile(r"(?<![\d.])-?\d+")
_MAX_DIGITS = 20  # a longer one is no sum


class Arithmetic(SingleTurnEnvironment):
    """One sum, one number.

    A task is ``{"question": str, "answer": str}``, e.g. ``"What is 17 + 25?"`` and ``"42"``.
    """

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """The question, and to say nothing but the number."""
        return [{"role": "user", "content": f"{task['question']} Reply with just the number."}]

    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Compare the last integer."""
        numbers = _INTEGER.findall(answer)
        right = bool(numbers) and len(numbers[-1]) <= _MAX_DIGITS and int(numbers[-1]) == int(task["answer"])
        return float(right), {"accuracy": float(right)}
