"""GSM8K: grade-school math with a verified numeric answer.

Guarantees: the answer's number and its format are judged and logged separately; only a right number earns the main
reward. ``demonstration`` earns the full reward, ``wrong_demonstration`` only the format reward.
"""

import random
import re
from typing import Any

from agentrl import Message, SingleTurnEnvironment
from agentrl.rewards.numeric import final_number, has_answer_line, numeric_reward

EXAMPLES = (
    (
        "Tom has 3 boxes with 4 pens each. He gives away 5 pens. How many pens are left?",
        "3 boxes hold 3 * 4 = 12 pens. 12 - 5 = 7 pens are left.\n#### 7",
    ),
    (
        "A ticket costs $8. Ann buys 2 tickets and a drink for $5. How much does she pay?",
        "2 tickets cost 2 * 8 = 16 dollars. With the drink it is 16 + 5 = 21 dollars.\n#### 21",
    ),
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # the dataset's calculator annotations, as in 48/2 = <<48/2=24>>24
_WRONG_BY = (1, 2, 3, 5, 10)
INSTRUCTION = "Reason briefly, step by step. Then finish with a last line of the form: #### <number>"


class GSM8K(SingleTurnEnvironment):
    """Asks a math problem; the answer ends with a number.

    A task is ``{"question": str, "answer": str}``, where the answer ends in ``#### N``.

    Args:
        format_reward: Reward for a last line ``#### <number>``, right or wrong, in addition to 1.0 for a right number.
        examples: Number of worked examples that come first, as earlier turns of the chat; at most 2.
    """

    dataset = "openai/gsm8k"
    columns = ("question", "answer")

    def __init__(self, format_reward: float = 0.2, examples: int = 0) -> None:
        if not 0 <= examples <= len(EXAMPLES):
            raise ValueError(f"examples={examples} must lie in 0..{len(EXAMPLES)}")
        self.format_reward = format_reward
        self.examples = examples
        self.reward_range = (0.0, 1.0 + format_reward)

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Returns the examples, then the question with the required format of the answer."""
        messages: list[Message] = []
        for question, answer in EXAMPLES[: self.examples]:
            messages += [put(question), {"role": "assistant", "content": answer}]
        return [*messages, put(task["question"])]

    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Returns accuracy plus ``format_reward`` times format, and both as metrics."""
        accuracy = numeric_reward(answer, task["answer"])
        well_formed = float(has_answer_line(answer))
        return accuracy + self.format_reward * well_formed, {"accuracy": accuracy, "format": well_formed}

    def extract(self, answer: str) -> str | None:
        """Returns the number that the answer ends with."""
        number = final_number(answer)
        return None if number is None else str(number)

    def demonstration(self, task: dict[str, Any]) -> str:
        """Returns the dataset's solution in the format that the prompt asks for."""
        reasoning, number = solution(task)
        return f"{reasoning}\n#### {number}".lstrip("\n")

    def wrong_demonstration(self, task: dict[str, Any], rng: random.Random) -> str:
        """Returns the same solution with a slightly different number at its end."""
        reasoning, number = solution(task)
        right = final_number(number) or 0
        off = rng.choice(_WRONG_BY) * rng.choice((1, -1))
        wrong = right - off if right + off < 0 <= right else right + off  # a negative number would be too easy to spot
        return f"{reasoning}\n#### {wrong}".lstrip("\n")


def solution(task: dict[str, Any]) -> tuple[str, str]:
    """Splits a dataset's answer into reasoning without calculator annotations and number without commas.

    Raises:
        ValueError: The answer does not end in ``#### <number>``.
    """
    reasoning, marks, number = task["answer"].rpartition("####")
    if not marks or final_number(number) is None:
        raise ValueError(f"the answer does not end in '#### <number>': {task['answer'][-40:]!r}")
    lines = [" ".join(line.split()) for line in _CALCULATION.sub("", reasoning).splitlines()]
    return "\n".join(line for line in lines if line), number.strip().replace(",", "")


def put(question: str) -> Message:
    """Returns a question with the instruction, as a user message."""
    return {"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}
