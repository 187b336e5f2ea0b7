"""Tests rows: each trained token appears once, for any split."""

import math
import random

import pytest
import torch

from agentrl.bench.made_batch import TrainSequence, made_tokens
from agentrl.models.prefix_tree import PrefixTree
from agentrl.train.branches import Branch, TokenColumns
from agentrl.train.layout import Layout, Padded, collate
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.rows import Row, RowArrays, build_rows, lay_out


def sequence(prompt: list[int], answer: list[int], advantage: float = 1.0) -> TrainSequence:
    mask = [0] * len(prompt) + [1] * len(answer)
    logprobs = [0.0] * len(prompt) + [-float(t) for t in answer]
    return TrainSequence(prompt + answer, mask, logprobs, [advantage] * len(mask))


def random_sequences(seed: int, groups: int) -> list[TrainSequence]:
    """Groups with a prompt each; few distinct tokens, so that answers begin alike."""
    rng = random.Random(seed)
    found = []
    for _ in range(groups):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 20))]
        for _ in range(rng.randint(1, 8)):
            found.append(sequence(prompt, [rng.randrange(3) for _ in range(rng.randint(1, 30))]))
    return found


def laid_out(
    sequences: list[TrainSequence], max_tokens: int, span: float = 4096.0
) -> tuple[list[RowArrays], TokenColumns]:
    """Returns the arrays of all rows, and the token columns that they index."""
    branches, tokens = made_tokens(sequences)
    return [lay_out(row, branches, tokens) for row in build_rows(branches, tokens, max_tokens, span)], tokens


def collated(sequences: list[TrainSequence], max_tokens: int, layout: Layout | None = None) -> MicroBatch:
    """Puts all rows into one micro-batch."""
    branches, tokens = made_tokens(sequences)
    chosen = layout or Padded(4096.0)
    return collate(chosen.rows(branches, tokens, max_tokens), branches, tokens, chosen, torch.device("cpu"))


def rows_of(sequences: list[TrainSequence], max_tokens: int, span: float = 4096.0) -> list[Row]:
    return build_rows(*made_tokens(sequences), max_tokens, span)


def trained(rows: list[RowArrays], tokens: TokenColumns) -> list[tuple[int, float, float]]:
    """Returns target, logprob and advantage of each trained token."""
    behavior, advantages = tokens.sampled["behavior"], tokens.sampled["advantages"]
    return sorted(
        (int(row.targets[index]), float(behavior[own]), float(advantages[own]))
        for row in rows
        for index, own in zip(row.trained, row.own, strict=True)
    )


def test_what_sequences_begin_with_in_common_is_stored_once() -> None:
    rows, _ = laid_out([sequence([1, 2, 3], [7, 8]), sequence([1, 2, 3], [7, 9], -1.0)], max_tokens=100)
    assert len(rows) == 1
    row = rows[0]
    assert row.token_ids.tolist() == [1, 2, 3, 7]  # 8 and 9 are targets only: nothing trained comes after them
    assert row.positions.tolist() == [0, 1, 2, 3]
    assert list(zip(row.sources, row.targets, strict=True)) == [(2, 7), (3, 8), (3, 9)]
    assert (row.trained.tolist(), row.places.tolist()) == ([0, 1, 0, 2], [0, 1, 2, 3])


def test_tokens_between_answers_stay_inputs_and_are_not_trained() -> None:
    turn = TrainSequence([1, 2, 5, 6, 8, 9], [0, 1, 0, 0, 1, 0], [0, -1, 0, 0, -2, 0], [0.5] * 6)
    rows, tokens = laid_out([turn], 100)
    assert rows[0].token_ids.tolist() == [1, 2, 5, 6]
    assert (rows[0].sources.tolist(), rows[0].targets.tolist()) == ([0, 3], [2, 8])
    assert trained(rows, tokens) == [(2, -1, 0.5), (8, -2, 0.5)]


def test_a_token_trained_in_one_sequence_and_given_in_another() -> None:
    given = TrainSequence([1, 2, 3], [0, 0, 1], [0, 0, -3], [1.0] * 3)
    sampled = TrainSequence([1, 2, 3], [0, 1, 1], [0, -2, -3], [-1.0] * 3)
    rows, tokens = laid_out([given, sampled], 100)
    assert rows[0].token_ids.tolist() == [1, 2] and len(rows[0].sources) == 2
    assert trained(rows, tokens) == [(2, -2, -1.0), (3, -3, -1.0), (3, -3, 1.0)]


def test_long_answers_do_not_share_a_row_for_the_sake_of_a_short_prompt() -> None:
    prompt = list(range(10))
    answers = [[100 + member, *range(200)] for member in range(4)]
    assert len(rows_of([sequence(prompt, a) for a in answers], 10_000, 100)) == 4
    assert len(rows_of([sequence(prompt, a) for a in answers], 10_000, 1e6)) == 1


def test_under_sparse_attention_whatever_shares_enough_is_one_row() -> None:
    group = [sequence(list(range(20)), [100 + member, *range(200)]) for member in range(4)]
    stranger = sequence([7, 8, 9], list(range(300, 400)))
    lengths = [len(row) for row in rows_of([*group, stranger], 10_000, math.inf)]
    assert sorted(lengths) == [102, 20 + 4 * 200], "the last token of each is a target only"
    assert len(rows_of([*group, stranger], 500, math.inf)) == 3, "no row over the budget"


@pytest.mark.parametrize("max_tokens", [1, 17, 64, 10_000])
def test_any_budget_trains_the_same_tokens(max_tokens: int) -> None:
    sequences = random_sequences(1, 12)
    expected = trained(*laid_out(sequences, 10_000))
    rows, tokens = laid_out(sequences, max_tokens)
    assert trained(rows, tokens) == expected
    assert len(expected) == sum(sum(s.loss_mask) for s in sequences)
    longest = max(len(s.token_ids) for s in sequences)
    assert all(len(row.token_ids) <= max(max_tokens, longest) for row in rows)


def test_a_sequence_that_trains_nothing_is_left_out() -> None:
    assert rows_of([TrainSequence([1, 2], [0, 0], [0, 0], [1.0] * 2)], 10) == []


def test_training_the_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        rows_of([TrainSequence([1, 2], [1, 1], [0, 0], [1.0] * 2)], 10)


@pytest.mark.parametrize("span", [4096.0, math.inf])
def test_a_row_is_the_prefix_tree_of_its_sequences(span: float) -> None:
    """Compares with a tree that is built token by token."""
    sequences = random_sequences(6, 8)
    branches, tokens = made_tokens(sequences)
    for row in build_rows(branches, tokens, 10_000, span):
        tree = PrefixTree()
        for index, inputs in zip(row.branches, row.inputs, strict=True):
            tree.add(list(sequences[index].token_ids[:inputs]))
        arrays = lay_out(row, branches, tokens)
        assert arrays.token_ids.tolist() == tree.token_ids and len(row) == len(tree)
        assert arrays.positions.tolist() == tree.positions and row.depths == sum(tree.positions)
        assert arrays.ends.tolist() == tree.ends


def test_a_first_token_that_is_to_be_trained_is_refused_also_after_a_message_without_tokens() -> None:
    branches, tokens = made_tokens([TrainSequence([], [], []), TrainSequence([5, 6], [1, 1], [-1.0, -1.0])])
    joined = Branch((0, 1), (False, True))
    with pytest.raises(ValueError, match="first token"):
        build_rows([joined], tokens, 100)
    with pytest.raises(ValueError, match="first token"):
        build_rows(branches, tokens, 100)
