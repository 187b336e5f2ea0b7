"""Tries splits of the devices and bounds of the age, and chooses the best.

Guarantees: every candidate runs the same episodes; the best one has the shortest step, and among those within 2% of it
the smallest bound, then the fewest tokens thrown away.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentrl.config.errors import ConfigError
from agentrl.config.recipe import Recipe
from agentrl.inference.backend import InferenceError
from agentrl.rollout.errors import RolloutError
from agentrl.sim.episodes import Shapes
from agentrl.sim.figures import Figures, bound_seconds, figures, warm_up
from agentrl.sim.simulation import Devices, Simulation
from agentrl.sim.virtual_loop import run_virtual

CLOSE = 1.02  # step times this near to the shortest are equally good
MOST_SPLITS = 3


@dataclass(frozen=True)
class Case:
    """A machine and a workload to try.

    Attributes:
        recipe: The recipe.
        devices: The machine; its split is replaced.
        shapes: Source of the episodes' shapes.
        steps: Steps that count.
    """

    recipe: Recipe
    devices: Devices
    shapes: Shapes
    steps: int

    @property
    def tokens(self) -> float:
        """Tokens of a step, on average."""
        return self.recipe.rollout.batch_size * self.recipe.rollout.group_size * self.shapes.mean()

    @property
    def answer(self) -> float:
        """Tokens of an answer, on average."""
        return self.shapes.mean() / self.shapes.turns()

    def run(self, inference: int, training: int, max_staleness: int) -> Figures:
        """Simulate one split and bound.

        Raises:
            ConfigError: The controller ended the run: the settings leave nothing to train on.
        """
        recipe = with_bound(self.recipe, max_staleness)
        devices = replace(self.devices, inference=inference, training=training)
        steps = warm_up(max_staleness) + self.steps

        async def simulated() -> Figures:
            done = await Simulation(recipe, devices, self.shapes, steps).run()
            return figures(done, devices, max_staleness, recipe.rollout.max_concurrent, self.answer)

        try:
            return run_virtual(simulated())
        except (RolloutError, InferenceError) as error:
            said = str(error).splitlines()
            why = said[0] if len(said) == 1 else f"{said[0]} {said[-1]}"
            raise ConfigError(
                f"the simulated run with {inference}+{training} devices and a bound of {max_staleness} ended before "
                f"its last step: {why}"
            ) from error

    def bound(self, inference: int, training: int) -> float:
        """Returns the shortest time of a step that a split allows."""
        devices = replace(self.devices, inference=inference, training=training)
        return bound_seconds(devices, self.recipe.rollout.max_concurrent, self.tokens, self.answer)


def with_bound(recipe: Recipe, max_staleness: int) -> Recipe:
    """Returns the recipe with another bound of the age."""
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_staleness": max_staleness})})


def splits(case: Case, devices: int) -> list[tuple[int, int]]:
    """Returns the most promising splits into (inference, training) devices, those with the shortest bound.

    With up to :data:`MOST_SPLITS` + 1 devices these are all.
    """
    every = [(inference, devices - inference) for inference in range(1, devices)]
    best = sorted(every, key=lambda split: case.bound(*split))[:MOST_SPLITS]
    return sorted(best, reverse=True)


def tried(case: Case, devices: int, bounds: Sequence[int]) -> Iterator[Figures]:
    """Yields the figures of each split and bound; of a split, no bound after one that gained nothing any more."""
    for split in splits(case, devices):
        before = float("inf")
        for bound in sorted(bounds):
            one = case.run(*split, bound)
            yield one
            if one.step_seconds * CLOSE >= before:
                break
            before = one.step_seconds


def best(found: Sequence[Figures]) -> Figures:
    """Returns the best of some figures."""
    shortest = min(one.step_seconds for one in found)
    near = [one for one in found if one.step_seconds <= shortest * CLOSE]
    return min(near, key=lambda one: (one.max_staleness, one.thrown, one.step_seconds))
