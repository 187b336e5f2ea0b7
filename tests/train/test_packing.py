"""Packing: each trained token once, whatever the split; budgets and balance."""

import random

import pytest

from agentrl.train.packing import Row, TrainSequence, build_rows, plan_microbatches, shared_prefix


def sequence(group: str, prompt: list[int], answer: list[int], advantage: float = 1.0) -> TrainSequence:
    mask = [0] * len(prompt) + [1] * len(answer)
    logprobs = [0.0] * len(prompt) + [-float(t) for t in answer]
    return TrainSequence(group, prompt + answer, mask, logprobs, advantage)


def random_sequences(seed: int, groups: int) -> list[TrainSequence]:
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 20))]
        for _ in range(rng.randint(1, 8)):
            found.append(sequence(f"g{group}", prompt, [rng.randrange(100) for _ in range(rng.randint(1, 30))]))
    return found


def trained(rows: list[Row]) -> list[tuple[int, float, float]]:
    return sorted(t for row in rows for t in zip(row.targets, row.logprobs, row.advantages, strict=True))


def test_the_shared_prompt_is_stored_once_per_row() -> None:
    rows = build_rows([sequence("a", [1, 2, 3], [7, 8]), sequence("a", [1, 2, 3], [9])], max_tokens=100)
    assert len(rows) == 1
    row = rows[0]
    assert row.token_ids == [1, 2, 3, 7]  # 8 and 9 are targets only: nothing trained comes after them
    assert row.positions == [0, 1, 2, 3]
    assert row.segments == [0, 0, 0, 1]
    assert (row.sources, row.targets) == ([2, 3, 2], [7, 8, 9])


def test_tokens_between_answers_stay_inputs_and_are_not_trained() -> None:
    turn = TrainSequence("a", [1, 2, 5, 6, 8, 9], [0, 1, 0, 0, 1, 0], [0, -1, 0, 0, -2, 0], 0.5)
    row = build_rows([turn], 100)[0]
    assert row.token_ids == [1, 2, 5, 6]
    assert list(zip(row.sources, row.targets, row.logprobs, strict=True)) == [(0, 2, -1), (3, 8, -2)]


@pytest.mark.parametrize("max_tokens", [1, 17, 64, 10_000])
def test_any_budget_trains_the_same_tokens(max_tokens: int) -> None:
    sequences = random_sequences(1, 12)
    expected = trained(build_rows(sequences, 10_000))
    rows = build_rows(sequences, max_tokens)
    assert trained(rows) == expected
    assert len(expected) == sum(sum(s.loss_mask) for s in sequences)
    for row in rows:
        members = max(row.segments, default=0)
        assert len(row) <= max_tokens or members <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_get_equally_many_microbatches_and_all_rows_once(ranks: int) -> None:
    rows = build_rows(random_sequences(2, 20), 64)
    plan = plan_microbatches(rows, ranks, 200)
    assert len({len(share) for share in plan}) == 1
    flat = [row for share in plan for batch in share for row in batch]
    assert sorted(map(id, flat)) == sorted(map(id, rows))
    for batch in (batch for share in plan for batch in share if len(batch) > 1):
        assert max(map(len, batch)) * len(batch) <= 200
    loads = [sum(len(row) for batch in share for row in batch) for share in plan]
    assert max(loads) - min(loads) <= max(map(len, rows))


def test_groups_with_different_prompts_do_not_share() -> None:
    assert shared_prefix([sequence("a", [1, 2], [3]), sequence("a", [1, 4], [3])]) == 1
    assert shared_prefix([sequence("a", [1, 2], [3]), sequence("a", [1, 2], [3])]) == 2


def test_a_sequence_that_trains_nothing_is_left_out() -> None:
    assert build_rows([TrainSequence("a", [1, 2], [0, 0], [0, 0], 1.0)], 10) == []


def test_training_the_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        build_rows([TrainSequence("a", [1, 2], [1, 1], [0, 0], 1.0)], 10)
