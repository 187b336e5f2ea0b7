"""Figures of a simulated run: step time, utilisation, ages, tokens thrown away.

Guarantees: pure; the first steps are left out of every figure: the servers start empty there and no version is old. A
share of tokens is of those that were generated between the first and the last step that count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.sim.account import Step
from agentrl.sim.device import Speed
from agentrl.sim.simulation import Devices


@dataclass(frozen=True)
class Figures:
    """Figures of one simulated run.

    Attributes:
        inference: Devices that generate.
        training: Devices that train.
        max_staleness: The bound that was tried.
        step_seconds: Mean time of a step.
        trainer_busy: Share of the time in which the trainer trained.
        servers_busy: Tokens generated, over those that the servers would have made at full load.
        age_mean: Mean age of trained episodes.
        age_max: Largest age of a trained episode.
        thrown: Share of the generated tokens that were thrown away.
        tokens_per_second: Trained tokens per second.
        steps: Steps that count.
    """

    inference: int
    training: int
    max_staleness: int
    step_seconds: float
    trainer_busy: float
    servers_busy: float
    age_mean: float
    age_max: int
    thrown: float
    tokens_per_second: float
    steps: int


def warm_up(max_staleness: int) -> int:
    """Returns the number of first steps that no figure counts."""
    return max_staleness + 2


def figures(
    steps: Sequence[Step], devices: Devices, max_staleness: int, max_concurrent: int, answer: float = math.inf
) -> Figures:
    """Computes the figures of a run.

    Args:
        steps: All steps, more than :func:`warm_up`.
        devices: The machine.
        max_staleness: The recipe's bound.
        max_concurrent: Episodes in flight, for the servers' full load.
        answer: Mean tokens of an answer, see :func:`full_speed`.

    Raises:
        ValueError: There are too few steps.
    """
    first, counted = steps[warm_up(max_staleness) - 1 : warm_up(max_staleness)], steps[warm_up(max_staleness) :]
    if not first or not counted:
        raise ValueError(f"{len(steps)} steps are too few for figures: want over {warm_up(max_staleness)}")
    seconds = counted[-1].end - first[0].end
    generated = counted[-1].generated - first[0].generated
    ages = [age for step in counted for age in step.ages]
    return Figures(
        inference=devices.inference,
        training=devices.training,
        max_staleness=max_staleness,
        step_seconds=seconds / len(counted),
        trainer_busy=sum(step.trained for step in counted) / seconds,
        servers_busy=generated / (full_speed(devices, max_concurrent, answer) * seconds),
        age_mean=fmean(ages),
        age_max=max(ages),
        thrown=(counted[-1].thrown - first[0].thrown) / generated,
        tokens_per_second=sum(step.tokens for step in counted) / seconds,
        steps=len(counted),
    )


def full_speed(devices: Devices, max_concurrent: int, answer: float = math.inf) -> float:
    """Returns the tokens per second of all servers with ``max_concurrent`` episodes, evenly spread.

    Args:
        devices: The machine.
        max_concurrent: Episodes in flight, each of which always has a request.
        answer: Mean tokens of an answer: a request that waits for its first token (:attr:`Speed.call`) gets none.
    """
    each, speed = max_concurrent / devices.inference, devices.speed
    sampling = _sampling(each, speed, answer)
    return devices.inference * speed.tokens_per_second(min(sampling, devices.slots or sampling))


def _sampling(requests: float, speed: Speed, answer: float) -> float:
    """Returns how many of a server's requests sample at a time, while the others wait for their first token.

    With ``m`` of ``n`` sampling, an answer takes ``s = answer * (token + sequence * m)`` seconds after its ``call``
    seconds, so ``m = n * s / (call + s)``: the positive root of a quadratic equation.
    """
    wait = speed.call / answer
    if not wait:
        return requests
    half = (wait + speed.token - requests * speed.sequence) / 2
    if not speed.sequence:
        return requests * speed.token / (wait + speed.token)
    return (math.sqrt(half**2 + speed.sequence * requests * speed.token) - half) / speed.sequence


def bound_seconds(devices: Devices, max_concurrent: int, tokens: float, answer: float = math.inf) -> float:
    """Returns the shortest time of a step that the split allows: generation at full load or training, the longer one.

    Args:
        devices: The machine.
        max_concurrent: Episodes in flight.
        tokens: Tokens of a step.
        answer: Mean tokens of an answer.
    """
    speed = full_speed(devices, max_concurrent, answer)
    return max(tokens / speed, devices.training_time(tokens) + devices.step_seconds)
