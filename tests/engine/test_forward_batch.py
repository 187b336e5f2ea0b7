"""What a forward pass computes, laid out by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.forward_batch import ROW_COST, Run, common_view, plan_decode, plan_prefill
from agentrl.models.prefix_tree import common_prefix

CPU = torch.device("cpu")


def test_prompts_share_what_they_begin_with_and_skip_what_is_cached() -> None:
    batch = plan_prefill([[5, 6, 7, 8], [5, 6, 9], [1, 2]], slots=[3, 0, 1], cached=[1, 1, 0], device=CPU)
    assert batch.tokens.tolist() == [1, 2, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 1, 2, 3, 2]
    assert batch.runs == [Run(3, 2, 3, 4), Run(0, 5, 1, 3), Run(1, 0, 2, 2)]
    assert batch.last.tolist() == [4, 5, 1]
    writes = list(
        zip(batch.write_slots.tolist(), batch.write_positions.tolist(), batch.write_tokens.tolist(), strict=True)
    )
    assert sorted(writes) == [(0, 1, 2), (0, 2, 5), (1, 0, 0), (1, 1, 1), (3, 1, 2), (3, 2, 3), (3, 3, 4)]


def test_a_prompt_that_begins_another_and_one_with_more_in_its_slot() -> None:
    batch = plan_prefill([[1, 2, 3], [1, 2]], slots=[0, 1], cached=[2, 1], device=CPU)
    assert batch.tokens.tolist() == [2, 3] and batch.last.tolist() == [1, 0]
    assert batch.write_slots.tolist() == [1, 0], "the first prompt has its second token already"


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6)


@given(prompts, prompts, st.integers(1, 3))
def test_every_prompt_finds_its_tokens_at_their_positions(
    prompts: list[list[int]], kept: list[list[int]], least: int
) -> None:
    prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    shared = [min(max(common_prefix(k, prompt) for k in kept), len(prompt) - 1) for prompt in prompts]
    cached = [length if length >= least else 0 for length in shared]
    batch = plan_prefill(prompts, list(range(len(prompts))), cached, CPU)
    found: dict[int, dict[int, int]] = {slot: {} for slot in range(len(prompts))}
    for slot, position, token in zip(
        batch.write_slots.tolist(), batch.write_positions.tolist(), batch.write_tokens.tolist(), strict=True
    ):
        assert batch.positions[token] == position
        found[slot][position] = int(batch.tokens[token])
    for index, (prompt, start) in enumerate(zip(prompts, cached, strict=True)):
        assert found[index] == {position: prompt[position] for position in range(start, len(prompt))}
        run = batch.runs[index]
        own = slice(run.first, run.first + run.count)
        assert batch.tokens[own].tolist() == (prompt[len(prompt) - run.count :])
        assert batch.tokens[batch.last[index]] == prompt[-1]
    covered = sorted(t for run in batch.runs for t in range(run.first, run.first + run.count))
    assert covered == list(range(len(batch.tokens))), "each token attends in exactly one run"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_no_other_common_view_costs_less(lengths: list[int]) -> None:
    def cost(view: int) -> int:
        return view * len(lengths) + sum(length + ROW_COST for length in lengths if length > view)

    assert cost(common_view(lengths)) == min(cost(length) for length in lengths)


def test_long_rows_go_alone() -> None:
    batch = plan_decode([1] * 9, [20, 3, 4000, 7, 9, 12, 12, 12, 30], None, 4096, torch.float32, CPU)
    assert batch.view == 32 and batch.alone == [2]
    assert (batch.mask[1] == 0).tolist() == [True] * 4 + [False] * 28
    assert not batch.mask[2].any(), "its own view is not used, but must be finite"


def test_rows_of_equal_slots_are_computed_once() -> None:
    batch = plan_decode([1, 2, 1], [5, 6, 5], ([0, 1], [0, 1, 0]), 128, torch.float32, CPU)
    assert batch.tokens.tolist() == [1, 2] and batch.positions.tolist() == [5, 6]
    assert batch.rows is not None and batch.rows.tolist() == [0, 1]
    assert batch.write_tokens is not None and batch.write_tokens.tolist() == [0, 1, 0]
    assert batch.write_positions.tolist() == [5, 6, 5]
