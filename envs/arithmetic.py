"""Sums of two small numbers: the environment of the recipe that proves learning.

Guarantees: accuracy and reward are 1 if and only if the last integer of the answer is the sum; a wrong sum
always gets less than a right one.
"""

import re
from typing import Any

from agentrl import Message, SingleTurnEnvironment
from agentrl.rewards.numeric import reference_number

_INTEGER = re.compile(r"(?<![\d.])-?\d+")
_MAX_DIGITS = 20  # a longer one is no sum


class Arithmetic(SingleTurnEnvironment):
    """Asks for a sum; the answer is a number.

    A task is ``{"question": str, "answer": str}``, e.g. ``"What is 17 + 25?"`` and ``"42"``.

    Args:
        digit_reward: Reward of a wrong sum of correct length: this (below 1) times the share of correct digits.
    """

    dataset = "arithmetic"
    columns = ("question", "answer")
    reward_range = (0.0, 1.0)

    def __init__(self, digit_reward: float = 0.0) -> None:
        if not 0 <= digit_reward < 1:
            raise ValueError(f"digit_reward={digit_reward} must lie in [0, 1)")
        self.digit_reward = digit_reward

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Returns the question, with the request to reply with just the number."""
        return [{"role": "user", "content": f"{task['question']} Reply with just the number."}]

    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Compare the last integer."""
        numbers = _INTEGER.findall(answer)
        said, right = (numbers[-1] if numbers else ""), reference_number(task["answer"])
        if said and len(said) <= _MAX_DIGITS and int(said) == right:
            return 1.0, {"accuracy": 1.0}
        return self.digit_reward * digit_share(said, task["answer"]), {"accuracy": 0.0}

    def extract(self, answer: str) -> str | None:
        """Returns the last integer of the answer."""
        numbers = _INTEGER.findall(answer)
        return numbers[-1] if numbers else None


def digit_share(said: str, right: str) -> float:
    """Computes the share of equal digits, place by place; 0 if the lengths differ or there is a sign."""
    if len(said) != len(right) or not said.isdigit():
        return 0.0
    return sum(a == b for a, b in zip(said, right, strict=True)) / len(right)
