"""Rows: each trained token once, whatever the split."""

import math
import random

import pytest
import torch

from agentrl.train.packing import Row, TrainSequence, build_rows
from agentrl.train.table import TokenTable


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


def trained(rows: list[Row], sequences: list[TrainSequence]) -> list[tuple[int, float, float]]:
    """Target, logprob and advantage of each trained token."""
    table = TokenTable.of(sequences, torch.device("cpu"))
    return sorted(
        (row.predictions[index][1], float(table.behavior[origin]), float(table.advantages[origin]))
        for row in rows
        for index, origin in zip(row.trained, row.origins, strict=True)
    )


def test_what_sequences_begin_with_in_common_is_stored_once() -> None:
    rows = build_rows([sequence([1, 2, 3], [7, 8]), sequence([1, 2, 3], [7, 9], -1.0)], max_tokens=100)
    assert len(rows) == 1
    row = rows[0]
    assert row.tree.token_ids == [1, 2, 3, 7]  # 8 and 9 are targets only: nothing trained comes after them
    assert row.tree.positions == [0, 1, 2, 3]
    assert row.predictions == [(2, 7), (3, 8), (3, 9)]
    assert (row.trained, row.origins) == ([0, 1, 0, 2], [0, 1, 2, 3])


def test_tokens_between_answers_stay_inputs_and_are_not_trained() -> None:
    turn = TrainSequence([1, 2, 5, 6, 8, 9], [0, 1, 0, 0, 1, 0], [0, -1, 0, 0, -2, 0], [0.5] * 6)
    row = build_rows([turn], 100)[0]
    assert row.tree.token_ids == [1, 2, 5, 6]
    assert row.predictions == [(0, 2), (3, 8)]
    assert trained([row], [turn]) == [(2, -1, 0.5), (8, -2, 0.5)]


def test_a_token_trained_in_one_sequence_and_given_in_another() -> None:
    given = TrainSequence([1, 2, 3], [0, 0, 1], [0, 0, -3], [1.0] * 3)
    sampled = TrainSequence([1, 2, 3], [0, 1, 1], [0, -2, -3], [-1.0] * 3)
    row = build_rows([given, sampled], 100)[0]
    assert row.tree.token_ids == [1, 2]
    assert trained([row], [given, sampled]) == [(2, -2, -1.0), (3, -3, -1.0), (3, -3, 1.0)]


def test_long_answers_do_not_share_a_row_for_the_sake_of_a_short_prompt() -> None:
    prompt = list(range(10))
    answers = [[100 + member, *range(200)] for member in range(4)]
    assert len(build_rows([sequence(prompt, a) for a in answers], 10_000, attention_span=100)) == 4
    assert len(build_rows([sequence(prompt, a) for a in answers], 10_000, attention_span=1e6)) == 1


def test_under_sparse_attention_whatever_shares_enough_is_one_row() -> None:
    group = [sequence(list(range(20)), [100 + member, *range(200)]) for member in range(4)]
    stranger = sequence([7, 8, 9], list(range(300, 400)))
    lengths = [len(row) for row in build_rows([*group, stranger], 10_000, math.inf)]
    assert sorted(lengths) == [102, 20 + 4 * 200], "the last token of each is a target only"
    assert len(build_rows([*group, stranger], 500, math.inf)) == 3, "no row over the budget"


@pytest.mark.parametrize("max_tokens", [1, 17, 64, 10_000])
def test_any_budget_trains_the_same_tokens(max_tokens: int) -> None:
    sequences = random_sequences(1, 12)
    expected = trained(build_rows(sequences, 10_000), sequences)
    rows = build_rows(sequences, max_tokens)
    assert trained(rows, sequences) == expected
    assert len(expected) == sum(sum(s.loss_mask) for s in sequences)
    longest = max(len(s.token_ids) for s in sequences)
    assert all(len(row) <= max(max_tokens, longest) for row in rows)


def test_a_sequence_that_trains_nothing_is_left_out() -> None:
    assert build_rows([TrainSequence([1, 2], [0, 0], [0, 0], [1.0] * 2)], 10) == []


def test_training_the_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        build_rows([TrainSequence([1, 2], [1, 1], [0, 0], [1.0] * 2)], 10)
