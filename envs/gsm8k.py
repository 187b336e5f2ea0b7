"""GSM8K: grade-school math with a verified numeric answer.

Guarantees: the answer's number and its format are judged and logged apart; only a right number earns the main reward.
"""

from typing import Any

from agentrl import Message, SingleTurnEnvironment
from agentrl.rewards.numeric import has_answer_line, numeric_reward

INSTRUCTION = "Reason briefly, step by step. Then finish with a last line of the form: #### <number>"


class GSM8K(SingleTurnEnvironment):
    """One problem, one answer.

    A task is ``{"question": str, "answer": str}``, where the answer ends in ``#### N``.

    Args:
        format_reward: Reward for a last line ``#### <number>``, right or wrong; a right number earns 1.0 beside it.
    """

    def __init__(self, format_reward: float = 0.2) -> None:
        super().__init__()
        self.format_reward = format_reward

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """The question and what the answer must look like."""
        return [{"role": "user", "content": f"{task['question']}\n\n{INSTRUCTION}"}]

    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Accuracy plus ``format_reward`` times format."""
        accuracy = numeric_reward(answer, task["answer"])
        well_formed = float(has_answer_line(answer))
        return accuracy + self.format_reward * well_formed, {"accuracy": accuracy, "format": well_formed}
