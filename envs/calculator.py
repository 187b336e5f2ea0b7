"""Calculations with a calculator as a tool.

Guarantees: accuracy is 1 if and only if the answer's last number is right, with or without the tool; the reward
for a well-formed call is given once per episode, so that further calls earn nothing.
"""

import ast
import operator
from typing import Any

from simpleeval import SimpleEval

from agentrl import Message, ToolEnvironment, tool
from agentrl.envkit.tools.tool_calls import ToolEvent, ToolEventKind
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

    def __init__(self, call_reward: float = 0.2, examples: int = 0, **settings: Any) -> None:
        if not 0 <= examples <= len(EXAMPLES):
            raise ValueError(f"examples={examples} must lie in 0..{len(EXAMPLES)}")
        super().__init__(**settings)
        self._call_reward = call_reward
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
        return [message for one in EXAMPLES[: self._examples] for message in worked(*one)] + [put(task["question"])]

    def call_reward(self, task: dict[str, Any], events: list[ToolEvent]) -> float:
        """Returns ``call_reward`` if all calls succeeded and no earlier message has earned it."""
        earned = all(event.kind is ToolEventKind.OK for event in events) and not self._earned
        self._earned |= earned
        return self._call_reward if earned else 0.0

    def reward(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Returns 1 for the right number, else 0."""
        accuracy = numeric_reward(answer, task["answer"])
        return accuracy, {"accuracy": accuracy}

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Start with ``options`` as the task."""
        self._earned = False
        return await super().reset(seed=seed, options=options)


EXAMPLES = (("What is 12 * 31?", "12 * 31", "372"), ("What is 95 - 128?", "95 - 128", "-33"))


def put(question: str) -> Message:
    """Returns a question with the instruction, as a user message."""
    return {"role": "user", "content": f"{question} {INSTRUCTION}"}


def worked(question: str, expression: str, answer: str) -> list[Message]:
    """Returns a worked example: a question, the tool call, its result and the answer."""
    call_id = f"example{len(expression)}"
    function = {"name": "calculate", "arguments": f'{{"expression": "{expression}"}}'}
    return [
        put(question),
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "name": "calculate", "content": answer},
        {"role": "assistant", "content": answer},
    ]
