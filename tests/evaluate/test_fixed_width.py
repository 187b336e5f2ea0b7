"""Ending when the interval is narrow: the interval against its formula, its level by sums over all ways and draws."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from agentrl.config.evaluation import EvalConfig
from agentrl.evaluate.ends import Ends, check_budget
from agentrl.evaluate.fixed_width import (
    is_looked_at,
    is_narrow,
    quantile_of,
    stopping_interval,
    tasks_needed,
    worst_coverage,
)
from agentrl.evaluate.tally import Row, TaskScores

DRAWS = 2000


def test_the_interval_is_agresti_and_coulls_with_two_and_a_half_of_each() -> None:
    middle, quantile = 32.5 / 55, 2.03
    half = quantile * math.sqrt(middle * (1 - middle) / 55)
    assert stopping_interval(30, 50, quantile) == pytest.approx((middle - half, middle + half))
    assert is_narrow(30, 50, quantile, half + 1e-9) and not is_narrow(30, 50, quantile, half - 1e-9)
    low, high = stopping_interval(np.array([0, 50]), np.array([50, 50]), quantile)
    assert low[0] == 0.0 and high[1] == 1.0 and high[0] == pytest.approx(1 - low[1])


def missed(mean: float, half_width: float, tasks: int, quantile: float) -> float:
    """Chance that the interval at the end misses the mean, by a recursion over numbers of tasks and of right ones."""
    chances, found = {0: 1.0}, 0.0
    for n in range(1, tasks + 1):
        after: dict[int, float] = {}
        for right, chance in chances.items():
            after[right] = after.get(right, 0.0) + chance * (1 - mean)
            after[right + 1] = after.get(right + 1, 0.0) + chance * mean
        chances = {}
        for right, chance in after.items():
            middle = (right + 2.5) / (n + 5)
            half = quantile * math.sqrt(middle * (1 - middle) / (n + 5))
            low, high = max(0.0, middle - half), min(1.0, middle + half)
            if n == tasks or (n % max(1, n // 50) == 0 and (high - low) / 2 <= half_width):
                found += chance * (not low <= mean <= high)
            else:
                chances[right] = chance
    return found


@pytest.mark.parametrize(
    ("half_width", "tasks"), [(0.1, 400), (0.1, 40), (0.15, 400), (0.2, 12), (0.3, 100), (0.45, 5)]
)
def test_the_quantile_covers_95_of_100_whatever_the_mean_and_no_smaller_one_does(half_width: float, tasks: int) -> None:
    quantile = quantile_of(half_width, tasks)
    worst = max(missed(mean, half_width, tasks, quantile) for mean in (0.003, 0.02, 0.05, 0.11, 0.26, 0.34, 0.5, 0.93))
    assert worst <= 0.05
    assert worst_coverage(half_width, tasks, quantile) >= 0.95
    plain = norm.ppf(0.975)
    assert quantile == pytest.approx(plain, abs=1e-6) or worst_coverage(half_width, tasks, quantile - 0.01) < 0.95


def test_with_many_tasks_it_comes_near_that_of_a_fixed_number() -> None:
    assert norm.ppf(0.975) < quantile_of(0.01, 1_000_000) == quantile_of(0.03, 20_000) < 2.03
    assert tasks_needed(0.05, 10_000) == pytest.approx((norm.ppf(0.975) / 2 / 0.05) ** 2, rel=0.06)


@pytest.mark.parametrize("half_width", [0.03, 0.1])
@pytest.mark.parametrize("mean", [0.05, 0.3, 0.5, 0.9])
def test_the_interval_at_the_end_covers_95_of_100_draws(half_width: float, mean: float) -> None:
    """It is 95 plus at most 2: it is not bought by asking for more than twice the tasks. Some tasks run on after it."""
    most, further = 1500 if half_width == 0.03 else 150, 8
    rng = np.random.default_rng([int(100 * mean), int(100 * half_width)])
    right = np.cumsum(rng.random((DRAWS, most + further)) < mean, axis=1)
    n, quantile = np.arange(1, most + further + 1), quantile_of(half_width, most)
    looks = np.array([is_looked_at(int(one)) for one in n])
    ends = is_narrow(right, n, quantile, half_width) & looks
    at = np.argmax(ends, axis=1)
    assert ends.any(axis=1).all()
    rows = np.arange(DRAWS)
    for late in (0, further):
        low, high = stopping_interval(right[rows, at + late], n[at + late], quantile)
        covered = np.mean((low <= mean) & (mean <= high))
        print(f"--until-ci {half_width}, accuracy {mean}, {late} tasks later: {covered:.4f} of {DRAWS} draws")
        assert covered >= 0.95 - 0.01, (late, covered)
        assert covered <= 0.97 + 0.01 or mean in (0.05, 0.9), (late, covered)


def test_tasks_with_partial_accuracies_are_covered_as_well() -> None:
    rng = np.random.default_rng(3)
    quantile, n = quantile_of(0.1, 150), np.arange(1, 151)
    looks = np.array([is_looked_at(int(one)) for one in n])
    for values in (rng.beta(0.2, 1.8, (DRAWS, 150)), rng.binomial(4, rng.beta(0.3, 0.3, (DRAWS, 150))) / 4):
        totals, mean = np.cumsum(values, axis=1), 0.5 if values.mean() > 0.3 else 0.1
        at = np.argmax(is_narrow(totals, n, quantile, 0.1) & looks, axis=1)
        low, high = stopping_interval(totals[np.arange(DRAWS), at], n[at], quantile)
        assert np.mean((low <= mean) & (mean <= high)) >= 0.95 - 0.01


def test_the_rule_ends_where_it_first_looks_narrow_and_reports_that_interval() -> None:
    rng = np.random.default_rng(5)
    quantile = quantile_of(0.12, 400)
    for mean in (0.2, 0.9):
        values = rng.random(400) < mean
        ends, right = Ends(EvalConfig(until_ci=0.12), 400), np.cumsum(values)
        for number, value in enumerate(values):
            ends.task(number, TaskScores(str(number), None, 1, 0, {"accuracy": float(value)}, {}))
            if ends.reason:
                break
        first = next(n for n in range(1, 401) if is_looked_at(n) and is_narrow(right[n - 1], n, quantile, 0.12))
        assert ends.n == first and f"is reached after {first} tasks" in ends.reason


def test_tasks_count_in_their_order_and_invalid_ones_do_not() -> None:
    ends = Ends(EvalConfig(until_ci=0.4), 10)
    scores = [{"accuracy": 1.0}, {}, {"accuracy": 0.0}, {"accuracy": 1.0}]
    for number in (3, 2, 1):
        ends.task(number, TaskScores(str(number), None, int(number != 1), int(number == 1), scores[number], {}))
        assert ends.n == 0, "an earlier task still runs"
    ends.task(0, TaskScores("0", None, 1, 0, scores[0], {}))
    assert (ends.n, ends.total) == (3, 2.0)
    ends.task(4, TaskScores("4", None, 1, 0, {"reward": 1.0}, {}))
    assert "needs an accuracy" in ends.reason


def row(**measures: float) -> Row:
    return Row("t", 0, None, False, False, "terminated", {}, measures, None, False)


def test_a_budget_ends_before_it_is_passed_by_what_runs() -> None:
    ends = Ends(EvalConfig(max_total_tokens=1000), 100)
    for _ in range(4):
        ends.begins()
    for number in range(8):
        ends.left()
        ends.episode(row(turns=1.0, prompt_tokens=60.0, answer_tokens=40.0))
        assert bool(ends.reason) == (number >= 6), "3 run, of 100 tokens each"
        ends.begins()
    assert ends.reason == "eval.max_total_tokens=1000 is used up" and ends.as_json()["spent"] == {"tokens": 800.0}


def test_an_episode_whose_tokens_are_not_told_counts_as_the_others_do() -> None:
    """A filtered prompt has no numbers; it ends nothing, and the budget is not passed for it either."""
    ends = Ends(EvalConfig(max_total_tokens=1000), 100)
    for number in range(10):
        told = {} if number == 1 else {"prompt_tokens": 60.0, "answer_tokens": 40.0}
        ends.episode(row(turns=1.0, **told))
        assert bool(ends.reason) == (number == 9)
    assert ends.reason == "eval.max_total_tokens=1000 is used up" and ends.tokens == 900.0


def test_a_budget_that_cannot_be_kept_is_said() -> None:
    ends = Ends(EvalConfig(max_total_tokens=1000), 100)
    ends.episode(row(turns=0.0))
    assert not ends.reason
    ends.episode(row(turns=1.0))
    assert "tells no numbers of tokens" in ends.reason
    with pytest.raises(Exception, match=r"eval.max_cost=2 needs the price of m: eval.price=\{input"):
        check_budget(EvalConfig(max_cost=2), "m", has_price=False)
