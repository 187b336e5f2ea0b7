"""The numbers of an evaluation against a second computation, written from the definitions alone.

Nothing here calls the estimators of the package: subsets are enumerated, intervals come from the textbook's formula of
a regression with clustered errors, p-values from binomial sums and random signs, and the chance that the stopping rule
misses the truth is summed up over all its paths.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binomtest, norm, t

from agentrl.config.evaluation import EvalConfig
from agentrl.core.episode import Episode, StopReason
from agentrl.evaluate.compare import p_value
from agentrl.evaluate.ends import Ends
from agentrl.evaluate.fixed_width import quantile_of, stopping_interval
from agentrl.evaluate.metrics import summarize
from agentrl.evaluate.paired import change
from agentrl.evaluate.tally import TaskScores

Sample = tuple[float | None, str | None]
"""Accuracy of a sample, ``None`` for an invalid one, and its answer."""


def drawn(seed: int, tasks: int = 24, samples: int = 5) -> list[list[Sample]]:
    """Tasks of differing difficulty; some samples are invalid, some say nothing, wrong ones agree at times."""
    rng = np.random.default_rng(seed)
    found: list[list[Sample]] = []
    for _ in range(tasks):
        p, own = rng.beta(0.8, 0.8), []
        for _ in range(samples):
            right = rng.random() < p
            answer = "right" if right else rng.choice(["a", "b", "c", ""])
            own.append((None, None) if rng.random() < 0.08 else (float(right), str(answer) or None))
        found.append(own)
    return found


def episodes(tasks: Sequence[Sequence[Sample]]) -> list[Episode]:
    return [
        Episode(
            group_id=f"eval0-{number}", task_id=f"test/{number}", index=index, seed=0, reward=accuracy, answer=answer,
            metrics={} if accuracy is None else {"accuracy": accuracy}, tag=("even", "odd")[number % 2],
            stop_reason=StopReason.INFERENCE_ERROR if accuracy is None else StopReason.TERMINATED,
        )
        for number, own in enumerate(tasks)
        for index, (accuracy, answer) in enumerate(own)
    ]  # fmt: skip


def judged(own: Sequence[Sample]) -> list[tuple[float, str | None]]:
    return [(accuracy, answer) for accuracy, answer in own if accuracy is not None]


def vote(some: Sequence[tuple[float, str | None]]) -> Fraction:
    """Chance that the answer given most often is right; of equally frequent ones each may be drawn."""
    counts = Counter(answer for _, answer in some if answer is not None)
    if not counts:
        return Fraction(0)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return Fraction(sum(answer == "right" for answer in first), len(first))


def of_subsets(own: Sequence[Sample], k: int) -> tuple[Fraction, Fraction, Fraction] | None:
    """pass@k, pass^k and maj@k of a task, over all its subsets of k judged samples."""
    subsets = list(itertools.combinations(judged(own), k))
    if not subsets:
        return None
    some = sum(any(accuracy for accuracy, _ in one) for one in subsets)
    every = sum(all(accuracy for accuracy, _ in one) for one in subsets)
    return (
        Fraction(some, len(subsets)),
        Fraction(every, len(subsets)),
        sum(map(vote, subsets), Fraction(0)) / len(subsets),
    )


@pytest.mark.parametrize("seed", range(6))
def test_all_numbers_are_those_of_the_definitions(seed: int) -> None:
    tasks = drawn(seed)
    found = summarize(episodes(tasks))
    assert (found.n, found.failed) == (sum(len(judged(own)) for own in tasks),
                                       sum(accuracy is None for own in tasks for accuracy, _ in own))  # fmt: skip
    means = [np.mean([accuracy for accuracy, _ in judged(own)]) for own in tasks if judged(own)]
    assert found.estimates["accuracy"].mean == pytest.approx(np.mean(means), abs=1e-12)
    for k in range(1, 6):
        rows = [row for own in tasks if (row := of_subsets(own, k)) is not None]
        for name, column in (("pass@", 0), ("pass^", 1), ("maj@", 2)):
            if name == "maj@" and k == 3:
                continue  # powers of two, and all
            expected = float(sum(row[column] for row in rows) / len(rows))
            assert found.estimates[f"{name}{k}"].mean == pytest.approx(expected, abs=1e-12), (name, k)
            assert found.as_metrics()[f"eval/{name}{k}_tasks"] == len(rows)
    for tag, rest in (("even", 0), ("odd", 1)):
        own = [mean for number, mean in enumerate(means) if number % 2 == rest] if len(means) == len(tasks) else None
        if own is not None:
            assert found.tags[tag].estimates["accuracy"].mean == pytest.approx(np.mean(own), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_the_accuracy_with_all_invalid_samples_replaced(seed: int) -> None:
    tasks = drawn(seed)
    one = summarize(episodes(tasks)).estimates["accuracy"]
    for value, bound in ((0.0, one.if_wrong), (1.0, one.if_right)):
        full = [[value if accuracy is None else accuracy for accuracy, _ in own] for own in tasks]
        assert bound == pytest.approx(np.mean([np.mean(own) for own in full]), abs=1e-12)


def clustered_half(values: np.ndarray) -> float:
    """Half the 95% interval of a regression on a constant whose errors are correlated within each row (CR1, t)."""
    tasks = len(values)
    of_cluster = (values - values.mean()).sum(axis=1)
    variance = tasks / (tasks - 1) * (of_cluster**2).sum() / values.size**2
    return float(t.ppf(0.975, tasks - 1)) * math.sqrt(variance)


def test_a_count_has_the_interval_of_a_regression_with_clustered_errors() -> None:
    rng = np.random.default_rng(4)
    values = rng.poisson(3.0 + 4.0 * rng.random((40, 1)), (40, 6)).astype(float)
    made = [
        Episode(group_id="g", task_id=str(task), index=index, seed=0, reward=float(value) + 10.0,
                stop_reason=StopReason.TERMINATED)
        for (task, index), value in np.ndenumerate(values)
    ]  # fmt: skip
    one = summarize(made).estimates["reward"]
    half = clustered_half(values)
    assert (one.low, one.high) == pytest.approx((values.mean() + 10 - half, values.mean() + 10 + half), rel=1e-12)


def test_a_share_has_wilsons_score_interval_with_the_spread_of_the_clusters() -> None:
    """The bounds are the shares that lie a quantile of their own standard errors away.

    The error is that of tasks which are right or wrong, times their spread in parts of that; to the tasks that tell it,
    two with the largest spread are added, on the scale of its logarithm. Each gives the quantile, Student's, four
    degrees of freedom.
    """
    rng = np.random.default_rng(5)
    values = (rng.random((60, 4)) < rng.beta(4, 0.4, (60, 1))).astype(float)
    made = [
        Episode(group_id="g", task_id=str(task), index=index, seed=0, reward=float(value), metrics={"accuracy": value},
                stop_reason=StopReason.TERMINATED)
        for (task, index), value in np.ndenumerate(values)
    ]  # fmt: skip
    one = summarize(made).estimates["accuracy"]
    wrong = 1 - values.mean(axis=1)  # the rarer: a task of which half is wrong tells more than one of a quarter
    tell = wrong.sum() ** 2 / (wrong**2).sum()
    variance = (clustered_half(values) / float(t.ppf(0.975, 59))) ** 2
    spread = variance / (values.mean() * (1 - values.mean()) / 60)
    assert 1 / 4 < spread < 1 and tell < 20
    counted = math.exp((tell * math.log(spread) + 2 * math.log(1.0)) / (tell + 2))
    quantile = float(t.ppf(0.975, min(4 * tell + 1, 59)))
    for bound in (one.low, one.high):
        own = math.sqrt(counted * bound * (1 - bound) / 60)
        assert abs(values.mean() - bound) / own == pytest.approx(quantile, rel=1e-9)


def test_p_values_are_binomial_sums_and_those_of_random_signs() -> None:
    rng = np.random.default_rng(6)
    before, after = (rng.random(120) < 0.5).astype(float), (rng.random(120) < 0.65).astype(float)
    gained, lost = int((after > before).sum()), int((after < before).sum())
    flips = gained + lost
    tail = sum(math.comb(flips, one) for one in range(min(gained, lost) + 1)) / 2**flips
    assert p_value(before.tolist(), after.tolist()) == pytest.approx(min(1.0, 2 * tail), rel=1e-9)
    first, second = rng.binomial(4, 0.5, 80) / 4, rng.binomial(4, 0.56, 80) / 4
    moved = second - first
    signs = rng.choice([-1.0, 1.0], (20_000, 80))
    by_chance = np.mean(np.abs((signs * moved).mean(axis=1)) >= abs(moved.mean()) - 1e-12)
    assert p_value(first.tolist(), second.tolist()) == pytest.approx(by_chance, abs=0.02)
    known = min(79.0, float(np.abs(moved).sum() ** 2 / (moved**2).sum()) + 1)
    half = float(t.ppf(0.975, known)) * moved.std(ddof=1) / math.sqrt(80)
    one = change(first.tolist(), second.tolist())
    assert (one.mean, one.low, one.high) == pytest.approx(
        (moved.mean(), moved.mean() - half, moved.mean() + half), rel=1e-9
    )


HALF = 0.15


def looks(most: int) -> list[int]:
    """Numbers of tasks after which the rule looks, as it does in :class:`Ends`."""
    return [n for n in range(1, most + 1) if n % max(1, n // 50) == 0]


def missed(mean: float, low: np.ndarray, high: np.ndarray, most: int) -> tuple[float, float]:
    """Chance that the interval at the end misses the mean, and the mean number of tasks, summed over all paths.

    Args:
        mean: Chance that a task is right.
        low: ``[most + 1, most + 1]`` lower bound by number of tasks and of right ones.
        high: Upper bounds.
        most: Number of tasks at which a path ends in any case.
    """
    alive, wrong, length = np.array([1.0]), 0.0, 0.0
    stops = set(looks(most))
    for n in range(1, most + 1):
        alive = np.append(alive * (1 - mean), 0.0) + np.append(0.0, alive * mean)
        right = np.arange(n + 1)
        ends = ((high - low)[n, right] / 2 <= HALF) if n in stops else np.zeros(n + 1, bool)
        ends |= n == most
        wrong += alive[ends & ((mean < low[n, right]) | (mean > high[n, right]))].sum()
        length += n * alive[ends].sum()
        alive = np.where(ends, 0.0, alive)
    return float(wrong), float(length)


@pytest.fixture(scope="module")
def bounds() -> tuple[np.ndarray, np.ndarray]:
    most = 130
    n, right = np.meshgrid(np.arange(1, most + 1), np.arange(most + 1), indexing="ij")
    inside = right <= n
    low, high = np.zeros((most + 1, most + 1)), np.ones((most + 1, most + 1))
    low[1:][inside], high[1:][inside] = stopping_interval(right[inside], n[inside], quantile_of(HALF, most))
    return low, high


@pytest.mark.parametrize("mean", [0.03, 0.1, 0.25, 0.5, 0.7, 0.88, 0.96])
def test_the_stopping_rule_misses_the_truth_in_at_most_five_of_a_hundred(
    mean: float, bounds: tuple[np.ndarray, np.ndarray]
) -> None:
    wrong, length = missed(mean, *bounds, most=130)
    assert wrong <= 0.05 and length < 125


def test_the_rule_ends_where_the_paths_end(bounds: tuple[np.ndarray, np.ndarray]) -> None:
    low, high = bounds
    rng = np.random.default_rng(9)
    for mean in (0.2, 0.6, 0.95):
        values = rng.random(130) < mean
        ends = Ends(EvalConfig(until_ci=HALF), 130)
        for number, value in enumerate(values):
            ends.task(number, TaskScores(str(number), None, 1, 0, {"accuracy": float(value)}, {}))
            if ends.reason:
                break
        right = np.cumsum(values)
        narrow = [n for n in looks(130) if (high - low)[n, right[n - 1]] / 2 <= HALF]
        assert ends.n == narrow[0]


def test_a_rule_that_looks_at_wilsons_interval_misses_more_often_than_it_says() -> None:
    """The test above can fail: ending when the usual interval happens to be narrow keeps no level."""
    most, q = 130, norm.ppf(0.975)
    n, right = np.meshgrid(np.arange(1, most + 1), np.arange(most + 1), indexing="ij")
    share = np.minimum(right / n, 1.0)
    middle = (share + q * q / (2 * n)) / (1 + q * q / n)
    half = q / (1 + q * q / n) * np.sqrt(share * (1 - share) / n + q * q / (4 * n * n))
    low, high = np.zeros((most + 1, most + 1)), np.ones((most + 1, most + 1))
    low[1:], high[1:] = middle - half, middle + half
    wilson = binomtest(10, 40).proportion_ci(0.95, method="wilson")
    assert (low[40, 10], high[40, 10]) == pytest.approx((wilson.low, wilson.high), abs=1e-9)
    assert missed(0.3, low, high, most)[0] > 0.08 and missed(0.5, low, high, most)[0] > 0.065


def test_the_rule_holds_for_tasks_of_several_samples() -> None:
    """2,000 evaluations of tasks with four samples each, whose accuracies lie between 0 and 1."""
    rng = np.random.default_rng(10)
    draws, most = 2000, 150
    difficulty = rng.beta(1.4, 0.6, (draws, most))
    totals = np.cumsum(rng.binomial(4, difficulty), axis=1)
    n = np.broadcast_to(np.arange(1, most + 1), totals.shape)
    pairs, place = np.unique(np.stack([totals, n]).reshape(2, -1), axis=1, return_inverse=True)
    found = stopping_interval(pairs[0] / 4, pairs[1], quantile_of(HALF, most))
    low, high = (one[place].reshape(totals.shape) for one in found)
    at = np.argmax((high - low) / 2 <= HALF, axis=1)
    rows = np.arange(draws)
    covered = np.mean((low[rows, at] <= 0.7) & (high[rows, at] >= 0.7))
    assert covered >= 0.95 - 0.01
