"""Tests bin packing and partitions against brute force."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.train.binpacking import fewest_bins, pack, partition

items = st.integers(4, 14).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=8), st.just(capacity))
)


def brute_force(sizes: list[int], capacity: int) -> int:
    """Returns the fewest bins over all ways to group the items."""

    def groups(index: int, rooms: tuple[int, ...]) -> int:
        if index == len(sizes):
            return len(rooms)
        size = sizes[index]
        opened = groups(index + 1, (*rooms, capacity - size))
        joined = (
            groups(index + 1, (*rooms[:n], room - size, *rooms[n + 1 :]))
            for n, room in enumerate(rooms)
            if room >= size
        )
        return min([opened, *joined])

    return groups(0, ())


@settings(max_examples=200, deadline=None)
@given(given=items)
def test_few_items_are_packed_within_the_bound_of_best_fit_decreasing(given: tuple[list[int], int]) -> None:
    sizes, capacity = given
    bins = pack(sizes, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in one) <= capacity for one in bins)
    optimum = brute_force(sizes, capacity)
    assert fewest_bins(sizes, capacity) <= optimum
    assert optimum <= len(bins) <= (11 * optimum + 6) / 9  # Dosa and Sgall: first- and best-fit decreasing


def test_three_bins_where_decreasing_heuristics_take_four() -> None:
    sizes = [4, 7, 7, 3, 2, 4, 5, 4]
    bins = pack(sizes, 12)
    assert sorted(sorted(sizes[i] for i in one) for one in bins) == [[2, 3, 7], [4, 4, 4], [5, 7]]


@pytest.mark.parametrize("sizes", [[3, 13], [0, 2], [-1]])
def test_what_fits_no_bin_is_an_error(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"size (13|0|-1) at index [01]"):
        pack(sizes, 12)


@pytest.mark.parametrize(("low", "high"), [(200, 4000), (1000, 9000), (5000, 16384), (4097, 5600)])
def test_many_items_need_hardly_more_than_the_bound(low: int, high: int) -> None:
    rng = random.Random(0)
    sizes = [rng.randint(low, high) for _ in range(600)]
    bins = pack(sizes, 16384)
    assert sorted(itertools.chain(*bins)) == list(range(600))
    assert max(sum(sizes[i] for i in one) for one in bins) <= 16384
    assert len(bins) <= 1.01 * fewest_bins(sizes, 16384)
    assert bins == pack(sizes, 16384), "ranks plan each for itself"


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.integers(1, 30), max_size=8), parts=st.integers(1, 4))
def test_parts_are_at_most_a_third_above_the_evenest(costs: list[int], parts: int) -> None:
    found = partition(costs, parts)
    assert len(found) == parts
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))
    best = min(
        max(sum(c for c, at in zip(costs, places, strict=True) if at == part) for part in range(parts))
        for places in itertools.product(range(parts), repeat=len(costs))
    )
    sums = [sum(costs[i] for i in part) for part in found]
    assert max(sums) <= 4 / 3 * best
    assert sums[0] == max(sums)
