import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from agentrl.evaluate.intervals import mean_interval, proportion_interval


def accepted(mean: float, k: int, n: int) -> bool:
    """Whether results that are no more likely than ``k`` of ``n``, by the smaller of their tails, have 5% together."""
    chances = [math.comb(n, one) * mean**one * (1 - mean) ** (n - one) for one in range(n + 1)]
    tails = [min(math.fsum(chances[: one + 1]), math.fsum(chances[one:])) for one in range(n + 1)]
    return math.fsum(chances[one] for one in range(n + 1) if tails[one] <= tails[k] * (1 + 1e-9)) > 0.05


@pytest.mark.parametrize(("k", "n"), [(0, 48), (15, 48), (48, 48), (1, 2), (0, 1), (3, 10)])
def test_proportions_get_blakers_interval(k: int, n: int) -> None:
    """The least and the largest proportion that are not refused, found by trying 2,001 and enumerating all results."""
    low, high = proportion_interval(k, n)
    fit = [one / 2000 for one in range(2001) if accepted(one / 2000, k, n)]
    assert (low, high) == pytest.approx((fit[0], fit[-1]), abs=1.1 / 2000)
    assert low <= fit[0] + 1e-9 and high >= fit[-1] - 1e-9, "never too narrow"


@pytest.mark.parametrize("n", [1, 2, 5, 10, 20, 50, 200])
def test_a_proportion_is_covered_in_at_least_95_of_100_whatever_it_is(n: int) -> None:
    """Exactly: summed up over all counts. Wilson's interval falls below 90 of 100 at ten and twenty trials."""
    bounds = np.array([proportion_interval(k, n) for k in range(n + 1)])
    assert np.all(np.diff(bounds, axis=0) >= 0) and bounds[0, 0] == 0 and bounds[-1, 1] == 1
    means = np.linspace(0.001, 0.999, 1997)
    chances = binom.pmf(np.arange(n + 1), n, means[:, None])
    covered = np.where((bounds[:, 0] <= means[:, None]) & (means[:, None] <= bounds[:, 1]), chances, 0).sum(axis=1)
    assert covered.min() >= 0.95
    q = norm.ppf(0.975)
    share = np.arange(n + 1) / n
    middle, half = share + q * q / (2 * n), q * np.sqrt(share * (1 - share) / n + (q / (2 * n)) ** 2)
    wilson = np.abs(means[:, None] * (1 + q * q / n) - middle) <= half
    assert np.where(wilson, chances, 0).sum(axis=1).min() < 0.92


def test_the_interval_lies_within_clopper_and_pearsons() -> None:
    for k, n in ((0, 7), (3, 10), (70, 200), (199, 200), (70_000, 100_000)):
        low, high = proportion_interval(k, n)
        assert low == 0 if k == 0 else binom.sf(k - 1, n, low) >= 0.025 - 1e-12
        assert high == 1 if k == n else binom.cdf(k, n, high) >= 0.025 - 1e-12
        assert low < k / n < high or k in (0, n)


def test_nothing_observed_gives_no_interval():
    assert all(math.isnan(bound) for bound in (*proportion_interval(0, 0), *mean_interval([]), *mean_interval([[1.0]])))


def test_means_get_students_interval_over_tasks():
    # Task means 0.5, 1, 0: mean 0.5, standard error 1/2/sqrt(3), t(0.975, 2) = 4.302652730
    half = 4.302652729911275 * 0.5 / math.sqrt(3)
    assert mean_interval([[1, 0], [1, 1], [0, 0]]) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-9)


def test_equal_means_give_no_interval():
    for values in ([[2.5]] * 3, [[0.3], [0.1 + 0.2]], [[0.0]] * 4):
        assert all(math.isnan(bound) for bound in mean_interval(values))


def test_more_samples_of_the_same_tasks_do_not_narrow_the_interval():
    assert mean_interval([[1.0], [0.0], [1.0]]) == mean_interval([[1.0] * 9, [0.0] * 9, [1.0] * 9])
