"""Tests plans of micro-batches: every row once, within the budget, equally many per rank, and at low cost."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.train.microbatches import _BATCH_COST, plan_packed, plan_padded
from agentrl.train.rows import Row
from tests.train.test_rows import random_sequences, rows_of


def row(length: int) -> Row:
    made = Row()
    made.add(0, length, 0)
    return made


def plan_of(rows: list[Row], ranks: int, budget: int, span: float = 4096.0, *, packed: bool = False) -> list:
    return (plan_packed if packed else plan_padded)(rows, ranks, budget, span)


def padded_cost(plan: list[list[list[Row]]], span: float) -> float:
    """Returns the padded cost of the rank with the most."""

    def cost(batch: list[Row]) -> float:
        longest = max(map(len, batch), default=0)
        return _BATCH_COST + len(batch) * (longest + longest**2 / span)

    return max(sum(map(cost, share)) for share in plan)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), max_size=25), ranks=st.integers(1, 4), budget=st.sampled_from([20, 64, 200]),
    packed=st.booleans(),
)  # fmt: skip
def test_any_plan_has_every_row_once_within_the_budget(
    lengths: list[int], ranks: int, budget: int, packed: bool
) -> None:
    rows = [row(length) for length in lengths]
    plan = plan_of(rows, ranks, budget, packed=packed)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1
    assert sorted(id(r) for share in plan for batch in share for r in batch) == sorted(map(id, rows))
    for batch in (batch for share in plan for batch in share if len(batch) > 1):
        sizes = [len(r) for r in batch]
        assert (sum(sizes) if packed else max(sizes) * len(sizes)) <= budget


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8), budget=st.sampled_from([60, 120, 300]))
def test_one_ranks_padded_plan_is_the_cheapest_of_all_groupings(lengths: list[int], budget: int) -> None:
    def cheapest(left: tuple[int, ...]) -> float:
        """Returns the lowest cost, over every subset to put with the longest remaining row."""
        if not left:
            return 0.0
        first, rest = left[0], left[1:]
        found = []
        for size in range(len(rest) + 1):
            if size and first * (size + 1) > budget:
                break
            for chosen in set(itertools.combinations(rest, size)):
                others = list(rest)
                for one in chosen:
                    others.remove(one)
                found.append(_BATCH_COST + (size + 1) * (first + first**2 / 500) + cheapest(tuple(others)))
        return min(found)

    plan = plan_of([row(length) for length in lengths], 1, budget, 500.0)
    assert padded_cost(plan, 500.0) == pytest.approx(cheapest(tuple(sorted(lengths, reverse=True))))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_get_about_as_much_each(ranks: int) -> None:
    rows = rows_of(random_sequences(2, 40), 64)
    plan = plan_of(rows, ranks, 200)
    alone = padded_cost(plan_of(rows, 1, 200), 4096.0)
    assert padded_cost(plan, 4096.0) <= 1.15 * alone / ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_bins_are_few_and_even(ranks: int) -> None:
    rng = random.Random(0)
    rows = [row(rng.randint(50, 900)) for _ in range(60)]
    total = sum(map(len, rows))
    plan = plan_of(rows, ranks, 2048, 10_000.0, packed=True)
    least = -(-total // 2048)
    assert len(plan[0]) == -(-least // ranks)
    loads = [sum(len(r) for batch in share for r in batch) for share in plan]
    assert max(loads) - min(loads) <= 0.02 * total / ranks
    sizes = [sum(map(len, batch)) for share in plan for batch in share]
    assert max(sizes) <= 2048 and min(sizes) > 0.8 * max(sizes), "no bin is left nearly empty"
