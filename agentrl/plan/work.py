"""Counts what a step has to do, in tokens and query-key pairs.

Guarantees: pure and without a random number: lengths are the quantiles of the lognormal distribution that ``agentrl
sim`` draws from, capped as there. A group's prompt is computed once in an update.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean

from agentrl.config.recipe import Recipe
from agentrl.plan.assumptions import Assumptions

QUANTILES = 256


@dataclass(frozen=True)
class Work:
    """The episodes of a step.

    Attributes:
        groups: Groups of a step.
        members: Episodes of a group.
        prompt: Tokens of a prompt.
        lengths: Sampled tokens of an episode, at equally likely quantiles.
        observation: Tokens of an episode that are neither prompt nor sampled.
        outside: Seconds of an episode outside of the servers.
        signal: Share of the groups that an update computes.
        shared: Tokens at the beginning of every prompt.
        distinct: Share of an update's tokens that are left when equal beginnings of answers are computed once.
    """

    groups: float
    members: float
    prompt: float
    lengths: tuple[float, ...]
    observation: float = 0.0
    outside: float = 0.0
    signal: float = 1.0
    shared: float = 0.0
    distinct: float = 1.0

    @property
    def episodes(self) -> float:
        """Episodes of a step."""
        return self.groups * self.members

    @cached_property
    def answer(self) -> float:
        """Mean number of sampled tokens of an episode."""
        return fmean(self.lengths)

    @property
    def sampled(self) -> float:
        """Tokens that the servers sample in a step."""
        return self.episodes * self.answer

    @property
    def context(self) -> float:
        """Mean length of a sequence while it is decoded, weighted by its tokens."""
        squares = fmean(length * length for length in self.lengths)
        return self.prompt + self.observation / 2 + squares / self.answer / 2

    @property
    def computed(self) -> float:
        """Tokens that an update computes."""
        own = self.prompt - self.shared + self.members * (self.answer + self.observation)
        return self.distinct * (self.shared + self.groups * self.signal * own)

    @property
    def predicted(self) -> float:
        """Tokens that go through the head in an update."""
        return self.distinct * self.episodes * self.signal * self.answer

    @property
    def pairs(self) -> float:
        """Query-key pairs of an update, in one layer and head."""
        after = [length + self.observation for length in self.lengths]
        own = fmean(one * one / 2 + one * self.prompt for one in after)
        prompt = (self.prompt**2 - self.shared**2) / 2  # what all prompts begin with is computed once
        return self.distinct * (self.shared**2 / 2 + self.groups * self.signal * (prompt + self.members * own))


def lognormal(mean: float, sigma: float, cap: float, count: int = QUANTILES) -> tuple[float, ...]:
    """Returns equally likely lengths of a lognormal distribution, none below 1 or above ``cap``.

    Args:
        mean: Mean of the distribution before the cap.
        sigma: Standard deviation of the length's logarithm.
        cap: Largest length.
        count: Number of quantiles.
    """
    middle, normal = math.log(max(mean, 1e-9)) - sigma**2 / 2, NormalDist()
    points = (normal.inv_cdf((index + 0.5) / count) for index in range(count))
    return tuple(min(cap, max(1.0, math.exp(middle + sigma * point))) for point in points)


def work_of(recipe: Recipe, known: Assumptions) -> Work:
    """Returns the work of a recipe's step under assumptions."""
    return Work(
        groups=recipe.rollout.batch_size,
        members=recipe.rollout.group_size,
        prompt=known["prompt"],
        lengths=lognormal(known["answer"], known["sigma"], recipe.sampling.max_new_tokens * known["turns"]),
        observation=known["observation"],
        outside=known["outside"],
        signal=known["signal"],
        shared=min(known["shared"], known["prompt"]),
        distinct=known["distinct"],
    )


def spread(lengths: Sequence[float], count: int) -> list[float]:
    """Returns ``count`` lengths with the distribution of ``lengths``, in an order that mixes short and long ones."""
    ordered = sorted(lengths)
    even = [ordered[int((index + 0.5) / count * len(ordered))] for index in range(count)]
    stride = next(step for step in range(max(1, round(count * 0.618)), count + 2) if math.gcd(step, count) == 1)
    return [even[index * stride % count] for index in range(count)]


def makespan(lengths: Sequence[float], slots: int, step_seconds: Callable[[float], float]) -> float:
    """Returns the seconds in which a server decodes all sequences that arrive together.

    Args:
        lengths: Tokens of each sequence, in the order in which they get a slot.
        slots: Most sequences at a time.
        step_seconds: Seconds of a token with so many sequences at a time.
    """
    waiting = list(reversed(lengths))
    running: list[float] = []  # shared tokens at which each ends
    at, seconds = 0.0, 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            heapq.heappush(running, at + waiting.pop())
        end, count = running[0], len(running)
        seconds += (end - at) * step_seconds(count)
        at = end
        while running and running[0] <= at:
            heapq.heappop(running)
    return seconds
