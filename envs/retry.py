"""A question with several attempts: after a wrong answer the model gets a hint and can try again.

Guarantees: a later right answer never earns more; metrics separate the first attempt from the last; when the
attempts are used up, the episode is terminated, because the limit is part of the task.
"""

from typing import Any

from agentrl import LanguageEnvironment, Message
from agentrl.rewards.numeric import final_number, reference_number


class Retry(LanguageEnvironment):
    """Asks a question whose answer is a number, and gives hints.

    A task is ``{"question": str, "answer": str}``.

    Args:
        attempts: Largest number of answers.
        later: Factor on the reward of a correct answer for each further attempt, 0 to 1.
        hint: Whether to say if the answer is too small or too large.
    """

    dataset = "arithmetic"
    columns = ("question", "answer")
    reward_range = (0.0, 1.0)

    def __init__(self, attempts: int = 3, later: float = 0.5, hint: bool = True) -> None:
        if attempts < 1 or not 0 <= later <= 1:
            raise ValueError(f"attempts={attempts} must be at least 1 and later={later} must lie in [0, 1]")
        self.attempts = attempts
        self.later = later
        self.hint = hint
        self._task: dict[str, Any] | None = None
        self._made = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Start with ``options`` as the task."""
        self._task, self._made = self.choose_task(seed, options), 0
        return [{"role": "user", "content": f"{self._task['question']} Reply with just the number."}], {}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Judge an attempt; answer a wrong one while attempts are left."""
        if self._task is None:
            raise RuntimeError("Retry.step called before reset, or after the episode's end")
        said, right = final_number(action.get("content") or ""), reference_number(self._task["answer"])
        self._made += 1
        correct, over = said == right, self._made >= self.attempts
        metrics = {"accuracy": float(correct), "attempts": float(self._made)}
        if self._made == 1:
            metrics["first_accuracy"] = float(correct)
        if correct or over:
            self._task = None
            return [], self.later ** (self._made - 1) if correct else 0.0, True, False, {"metrics": metrics}
        text = "There is no number in your answer."
        if said is not None:
            text = f"That is too {'small' if said < right else 'large'}." if self.hint else "That is wrong."
        return [{"role": "user", "content": f"{text} Try again."}], 0.0, False, False, {"metrics": metrics}
