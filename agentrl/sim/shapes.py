"""Sources of episode shapes: a lognormal distribution, a file of lengths, recorded episodes.

Guarantees: pure; the same task and seed give the same shape. Members of a group are drawn from one recorded group where
there are records, so lengths and rewards are as alike within a group as they were in the run.
"""

import math
import random
from collections.abc import Sequence
from statistics import fmean

from agentrl.config.errors import ConfigError
from agentrl.sim.episodes import Shape, Turn


class Lognormal:
    """Episodes of one answer with lognormal lengths.

    Args:
        mean: Mean length in tokens, before the cap.
        sigma: Standard deviation of the length's logarithm.
        cap: Longest answer.
    """

    def __init__(self, mean: float, sigma: float, cap: int) -> None:
        self._mu = math.log(mean) - sigma**2 / 2
        self._sigma = sigma
        self._cap = cap

    def of(self, task: str, seed: int) -> Shape:
        """Returns a shape with a random reward of 0 or 1."""
        chance = random.Random(seed)
        length = round(chance.lognormvariate(self._mu, self._sigma))
        return Shape((Turn(max(1, min(self._cap, length))),), float(chance.random() < 0.5))

    def mean(self, samples: int = 20_000) -> float:
        """Returns the mean number of tokens of an episode, capped ones included."""
        return fmean(self.of("", seed).tokens for seed in range(samples))

    def turns(self) -> float:
        """Returns 1."""
        return 1.0


class Recorded:
    """Shapes drawn from groups of recorded ones.

    Args:
        groups: Groups of shapes, each with at least one.
    """

    def __init__(self, groups: Sequence[Sequence[Shape]]) -> None:
        if not groups:
            raise ConfigError("there are no recorded episodes to take lengths from")
        self._groups = groups

    def of(self, task: str, seed: int) -> Shape:
        """Returns a member of the group that the task's name chooses."""
        group = self._groups[random.Random(task).randrange(len(self._groups))]
        return group[random.Random(seed).randrange(len(group))]

    def mean(self) -> float:
        """Returns the mean number of tokens of an episode."""
        return fmean(fmean(shape.tokens for shape in group) for group in self._groups)

    def turns(self) -> float:
        """Returns the mean number of answers of an episode."""
        return fmean(fmean(len(shape.turns) for shape in group) for group in self._groups)


class Lengths:
    """Episodes of one answer, whose length is one of those given.

    Args:
        lengths: Lengths in tokens; an episode has at least one.

    Raises:
        ConfigError: There are none, or one is negative or not finite.
    """

    def __init__(self, lengths: Sequence[float]) -> None:
        if not lengths:
            raise ConfigError("there is no length to draw from")
        wrong = next((length for length in lengths if not 0 <= length < math.inf), None)
        if wrong is not None:
            raise ConfigError(f"an episode cannot have {wrong:g} tokens")
        self._lengths = [max(1, round(length)) for length in lengths]

    def of(self, task: str, seed: int) -> Shape:
        """Returns a shape with a random reward of 0 or 1."""
        chance = random.Random(seed)
        return Shape((Turn(chance.choice(self._lengths)),), float(chance.random() < 0.5))

    def mean(self) -> float:
        """Returns the mean number of tokens of an episode."""
        return fmean(self._lengths)

    def turns(self) -> float:
        """Returns 1."""
        return 1.0
