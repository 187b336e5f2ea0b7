import math

import pytest

from agentrl.evaluate.intervals import mean_interval, proportion_interval


def wilson(k: int, n: int) -> tuple[float, float]:
    z, p = 1.959963984540054, k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return centre - half, centre + half


@pytest.mark.parametrize(("k", "n"), [(0, 48), (15, 48), (48, 48), (1, 2)])
def test_proportions_get_wilsons_interval(k, n):
    assert proportion_interval(k, n) == pytest.approx(wilson(k, n), abs=1e-9)


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
