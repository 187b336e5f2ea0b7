"""Calculations with a calculator as a tool.

Guarantees: accuracy is 1 if and only if the answer's last number is right, with or without the tool; the reward
for a well-formed call is given once per episode, so that further calls earn nothing.
"""

import ast
import operator
from typing import Any

from simpleeval import SimpleEval

from agentrl import Message, ToolEnvironment, tool, worked_call
from agentrl.rewards.numeric import numeric_reward

INSTRUCTION = "Use the calculate tool, then reply with just the number."
MAX_CHARS = 200  # an expression longer than this is no calculation of these tasks
MAX_BITS = 4000  # of a result: larger ones take seconds, and Python refuses to print them


def bounded_power(base: float, exponent: float) -> float:
    """Computes ``base ** exponent``; raises ``ValueError`` if the result would be too large."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError(f"{base} ** {exponent} is too large")
    return base**exponent


def bounded_product(first: float, second: float) -> float:
    """Computes ``first * second``; raises ``ValueError`` for other types or too large a result."""
    if not all(isinstance(one, int | float) for one in (first, second)):
        raise ValueError("only numbers can be multiplied")
    if sum(one.bit_length() for one in (first, second) if isinstance(one, int)) > MAX_BITS:
        raise ValueError("the product is too large")
    return first * second


OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: bounded_product, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: bounded_power,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
FUNCTIONS = {"abs": abs, "round": round, "min": min, "max": max}


class Calculator(ToolEnvironment):
    """Asks for a calculation and offers a calculator; the answer is a number.

    A task is ``{"question": str, "answer": str}``, e.g. ``"What is 348 * 27?"`` and ``"9396"``.

    Args:
        call_reward: Reward of the first message whose calls all succeed, in addition to 1.0 for a correct answer.
        examples: Worked calculations that come first, as earlier turns of the chat with their tool call; at most 2.
        settings: Limits of :class:`~agentrl.ToolEnvironment`.
    """

    dataset = "calculation"
    columns = ("question", "answer")

    def __init__(self, call_reward: float = 0.2, examples: int = 0, **settings: Any) -> None:
        if not 0 <= examples <= len(EXAMPLES):
            raise ValueError(f"examples={examples} must lie in 0..{len(EXAMPLES)}")
        super().__init__(**settings)
        self.first_call_reward = call_reward
        self._examples = examples
        self.reward_range = (0.0, 1.0 + call_reward)

    @tool
    async def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: Such as 12 * 7
        """
        if len(expression) > MAX_CHARS:
            raise ValueError(f"expression is longer than {MAX_CHARS} characters")
        return str(SimpleEval(operators=OPERATORS, functions=FUNCTIONS).eval(expression))

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Returns the examples, then the question."""
        messages = [
            message
            for question, expression, answer in EXAMPLES[: self._examples]
            for message in worked_call(put(question), "calculate", {"expression": expression}, answer, answer)
        ]
        return [*messages, {"role": "user", "content": put(task["question"])}]

    def reward(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Returns 1 for the right number, else 0."""
        accuracy = numeric_reward(answer, task["answer"])
        return accuracy, {"accuracy": accuracy}


EXAMPLES = (("What is 12 * 31?", "12 * 31", "372"), ("What is 95 - 128?", "95 - 128", "-33"))


def put(question: str) -> str:
    """Returns a question with the instruction."""
    return f"{question} {INSTRUCTION}"
