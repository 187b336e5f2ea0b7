"""A first look at how a model does in an environment: whether its rewards could teach it anything.

Guarantees: pure functions of the rewards of a few groups of episodes; failed episodes count in neither spread nor
success.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SAME = 1e-9  # rewards that differ by less are equal: their differences are rounding


@dataclass(frozen=True)
class FirstLook:
    """Outcomes of a few groups of episodes, each group of one task.

    Attributes:
        rewards: ``[groups][episodes]`` rewards of the episodes that did not fail.
        solved: ``[groups][episodes]`` whether each of them solved its task.
        failed: Number of episodes that failed.
    """

    rewards: Sequence[Sequence[float]]
    solved: Sequence[Sequence[bool]]
    failed: int = 0

    @property
    def with_spread(self) -> int:
        """Number of groups whose rewards differ."""
        return sum(max(group) - min(group) > SAME for group in self.rewards if group)

    @property
    def solve_rate(self) -> float:
        """Share of the episodes that solved their task; 0 without episodes."""
        every = [one for group in self.solved for one in group]
        return sum(every) / len(every) if every else 0.0

    def summary(self) -> str:
        """Says in one line what was seen."""
        every = [reward for group in self.rewards for reward in group]
        if not every:
            return f"no episode could be judged ({self.failed} failed)"
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{len(every)} episodes of {len(self.rewards)} tasks: mean reward {sum(every) / len(every):.3f}, "
            f"{self.solve_rate:.0%} solved, {self.with_spread} of {len(self.rewards)} groups with different "
            f"rewards{failed}"
        )

    def problems(self) -> list[tuple[str, str]]:
        """Returns what would keep a run from learning, each with what to do about it."""
        if not any(self.rewards):
            return [("no episode could be judged", "See the errors above; `agentrl env play` shows an episode.")]
        if self.solve_rate == 1:
            return [("every task is solved already", "Give harder tasks: there is nothing to learn from these.")]
        found: list[tuple[str, str]] = []
        if not self.with_spread:
            found.append(
                (
                    "no spread: the rewards within each group are all equal, so GRPO learns nothing from them",
                    "Put a worked example into the prompt (agentrl.worked_call), pay for the form "
                    "(ToolEnvironment.first_call_reward, or part of the reward), or give easier tasks.",
                )
            )
        if self.solve_rate == 0:
            found.append(
                (
                    "no task was ever solved" + (": only the form can be learned" if self.with_spread else ""),
                    "Give easier tasks or a larger model, unless you expect success to follow once the form is "
                    "learned (as in calculator_grpo).",
                )
            )
        return found
