"""The confidence sequence: against its closed form, and its level under looks after each task and an early end."""

import math

import numpy as np
import pytest
from scipy.special import beta as beta_function

from agentrl.config.recipe import EvalConfig
from agentrl.evaluate.ends import Ends, check_budget
from agentrl.evaluate.sequence import log_evidence, prior_weight, sequence_interval, tasks_needed
from agentrl.evaluate.tally import Row, TaskScores

DRAWS = 2000


def test_the_evidence_is_the_likelihood_ratio_averaged_over_the_prior() -> None:
    """Integrated on a grid of means instead of in closed form."""
    weight, mean, right, n = 12.0, 0.3, 9, 20
    grid = np.linspace(0, 1, 200_001)[1:-1]
    density = grid ** (weight * mean - 1) * (1 - grid) ** (weight * (1 - mean) - 1)
    density /= beta_function(weight * mean, weight * (1 - mean))
    ratio = (grid / mean) ** right * ((1 - grid) / (1 - mean)) ** (n - right)
    expected = math.log(np.sum(density * ratio) * (grid[1] - grid[0]))
    assert log_evidence(mean, right, n, weight) == pytest.approx(expected, abs=1e-4)


def test_the_bounds_are_where_the_evidence_is_twenty() -> None:
    low, high = sequence_interval(30, 50, 20.0)
    for bound in (low, high):
        assert log_evidence(bound, 30, 50, 20.0) == pytest.approx(math.log(20), abs=1e-6)
    assert sequence_interval(0, 10, 5.0)[0] == 0.0 and sequence_interval(10, 10, 5.0)[1] == 1.0
    wide = sequence_interval(np.array([30, 300]), np.array([50, 500]), 20.0)
    assert (wide[0][0], wide[1][0]) == pytest.approx((low, high)) and wide[1][1] - wide[0][1] < high - low


@pytest.mark.parametrize("mean", [0.05, 0.5, 0.8])
def test_the_mean_leaves_the_sequence_in_at_most_five_of_a_hundred_evaluations(mean: float) -> None:
    """Looked at after each of 2,000 tasks; where tasks have partial accuracies it holds all the more."""
    rng = np.random.default_rng(3)
    n = np.arange(1, 2001)
    weight = prior_weight(0.05)
    for values in (rng.random((DRAWS, 2000)) < mean, rng.beta(8 * mean, 8 * (1 - mean), (DRAWS, 2000))):
        evidence = log_evidence(mean, np.cumsum(values, axis=1), n, weight)
        missed = np.mean(evidence.max(axis=1) >= math.log(20))
        assert missed <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / DRAWS), missed


def ended(values: np.ndarray, half_width: float) -> tuple[int, tuple[float, float]]:
    """Number of tasks after which the rule ends, and the interval that is reported."""
    ends = Ends(EvalConfig(until_ci=half_width), len(values))
    for number, value in enumerate(values):
        ends.task(number, TaskScores(str(number), None, 1, 0, {"accuracy": float(value)}, {}))
        if ends.reason:
            break
    return ends.n, sequence_interval(ends.total, ends.n, prior_weight(half_width))


def test_the_interval_at_the_end_of_the_rule_holds() -> None:
    """Against the naive rule, which ends when Wilson's interval is so narrow: it misses more often than said."""
    half_width, mean = 0.12, 0.9
    n = np.arange(1, 401)
    rng = np.random.default_rng(5)
    right = np.cumsum(rng.random((DRAWS, 400)) < mean, axis=1)
    pairs, place = np.unique(
        np.stack([right, np.broadcast_to(n, right.shape)]).reshape(2, -1), axis=1, return_inverse=True
    )
    bounds = sequence_interval(pairs[0], pairs[1], prior_weight(half_width))
    low, high = (one[place].reshape(right.shape) for one in bounds)
    at = np.argmax((high - low) / 2 <= half_width, axis=1)
    rows = np.arange(DRAWS)
    assert np.all((high - low)[rows, at] / 2 <= half_width)
    covered = np.mean((low[rows, at] <= mean) & (mean <= high[rows, at]))
    assert covered >= 0.95 - 0.01, covered
    for draw in range(3):
        values = np.diff(right[draw], prepend=0)
        tasks, found = ended(values, half_width)
        assert abs(tasks - (at[draw] + 1)) <= max(1, tasks // 50), "the rule looks after each fiftieth"
        assert (found[1] - found[0]) / 2 <= half_width


def test_the_number_of_tasks_is_foretold() -> None:
    n = tasks_needed(0.05)
    low, high = sequence_interval(n / 2, n, prior_weight(0.05))
    assert (high - low) / 2 == pytest.approx(0.05, rel=0.02)


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
