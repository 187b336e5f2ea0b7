"""An environment that even a random model gets different rewards from."""

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
