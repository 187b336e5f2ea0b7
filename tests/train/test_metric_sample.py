"""Tests the sample of branches that is computed for metrics alone."""

import random

import numpy as np
import pytest

from agentrl.bench.made_batch import TrainSequence, made_tokens
from agentrl.train.branches import Branch, TokenColumns, input_length, trained_count
from agentrl.train.metric_sample import sample_branches, tokens_to_compute


def made(count: int = 12, seed: int = 0) -> tuple[list[Branch], TokenColumns]:
    rng = random.Random(seed)
    sequences = []
    for index in range(count):
        prompt, answer = rng.randint(2, 9), rng.randint(1, 20)
        ids = [rng.randint(3, 90) for _ in range(prompt + answer)]
        sequences.append(TrainSequence(ids, [0] * prompt + [1] * answer, [0.0] * len(ids), group=index // 4))
    return made_tokens(sequences)


@pytest.mark.parametrize("budget", [1.0, 60.0, 150.0])
def test_the_weighted_sum_over_a_sample_is_unbiased(budget: float) -> None:
    branches, tokens = made()
    counts = np.array([trained_count(one, tokens) for one in branches])
    values = np.random.default_rng(1).normal(3.0, 2.0, len(branches)) * counts  # sums over each branch's tokens
    steps, found = 1597, 0.0
    for version in range(steps):
        drawn = sample_branches(branches, tokens, budget, version)
        assert sum(one.weight * counts[one.number] for one in drawn) == pytest.approx(counts.sum())
        found += sum(one.weight * values[one.number] for one in drawn)
    assert found / steps == pytest.approx(values.sum(), rel=3e-3)


@pytest.mark.parametrize("budget", [40.0, 60.0, 150.0])
def test_a_sample_stays_within_its_budget_on_average_and_every_branch_gets_its_turn(budget: float) -> None:
    branches, tokens = made()
    computed, seen = [], set()
    for version in range(377):
        drawn = sample_branches(branches, tokens, budget, version)
        computed.append(sum(input_length(one, tokens) for one in drawn))
        seen |= {one.number for one in drawn}
    assert np.mean(computed) <= budget and seen == set(range(len(branches)))


def test_at_least_one_branch_is_drawn_and_all_where_the_budget_allows() -> None:
    branches, tokens = made()
    assert len(sample_branches(branches, tokens, 0.0, 5)) == 1
    everything = sample_branches(branches, tokens, 1e9, 5)
    assert everything == branches and {one.weight for one in everything} == {1.0}
    assert sample_branches([], tokens, 10.0, 5) == []


def test_a_prompt_of_a_group_is_computed_once() -> None:
    ids = list(range(3, 15))
    sequences = [
        TrainSequence(ids[: 8 + n], [0] * 8 + [1] * n, [0.0] * (8 + n), group=g) for g in (0, 1) for n in (2, 4)
    ]
    branches, tokens = made_tokens(sequences)
    assert tokens_to_compute(branches, tokens) == 2 * (2 + 4 + 7), "the last token of an answer is not an input"
