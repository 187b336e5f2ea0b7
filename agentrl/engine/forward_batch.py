"""Layout of one forward pass: its tokens, and the slots that their keys and values are read from and written to.

Guarantees: nothing is padded; every token of several prompts' common beginning is computed once; a request's attention
costs what its own length does, whatever runs beside it. Both kinds of batch are plain data: the leaner forward
(:mod:`~agentrl.engine.attention`) and transformers' own (:mod:`~agentrl.engine.own_forward`) read
the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.models.prefix_tree import PrefixTree

VIEW_STEP = 16  # positions; the common view of a decode step is a multiple of it: aligned rows, few shapes
ROW_COST = 256  # positions: what attending to one row by itself costs besides its length


@dataclass(frozen=True)
class Run:
    """Tokens of one prompt that no prompt before it has, next to each other in the batch.

    Attributes:
        slot: Slot that holds the whole prompt's keys and values.
        first: Index of the first token in the batch.
        count: Number of tokens; 0 if another prompt has them all.
        length: Tokens of the slot up to and with the last one.
    """

    slot: int
    first: int
    count: int
    length: int


@dataclass(frozen=True)
class Prefill:
    """Tokens of some prompts.

    Attributes:
        tokens: int64 ``[tokens]``.
        positions: int64 ``[tokens]``.
        runs: One per prompt.
        last: Index in the batch of each prompt's last token, int64 ``[prompts]``.
        write_slots: Slots to write to, int64 ``[writes]``; a token that two prompts share is written twice.
        write_positions: int64 ``[writes]``.
        write_tokens: Index in the batch, int64 ``[writes]``.
    """

    tokens: Tensor
    positions: Tensor
    runs: list[Run]
    last: Tensor
    write_slots: Tensor
    write_positions: Tensor
    write_tokens: Tensor


@dataclass(frozen=True)
class Decode:
    """One token for each of the slots 0..slots-1, of which equal ones are computed once.

    Attributes:
        tokens: int64 ``[rows]``.
        positions: int64 ``[rows]``.
        rows: Slot that each row attends to, int64 ``[rows]``; ``None``: row ``i`` is slot ``i``.
        lengths: Positions that each row attends to.
        view: Positions that all rows attend to together, through ``mask``.
        mask: ``[rows, view]``, added to scores.
        alone: Rows that are longer than the view, and are computed by themselves.
        write_slots: int64 ``[slots]``.
        write_positions: int64 ``[slots]``.
        write_tokens: Row that computes each slot's token, int64 ``[slots]``; ``None`` like ``rows``.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor | None
    lengths: list[int]
    view: int
    mask: Tensor
    alone: list[int]
    write_slots: Tensor
    write_positions: Tensor
    write_tokens: Tensor | None


def plan_prefill(
    prompts: Sequence[Sequence[int]], slots: Sequence[int], cached: Sequence[int], device: torch.device
) -> Prefill:
    """Lay out prompts, of which some tokens are in their slots already.

    Args:
        prompts: Ids of each.
        slots: Slot of each.
        cached: Leading tokens that are in the slot; fewer than the prompt has. Of two prompts that share more than the
            cached tokens of one, the other must have as many or be a beginning of it: one tree was asked for both.
        device: Device of the tensors.
    """
    tree, batch, write_slots, write_positions, write_tokens = PrefixTree(), _Numbers(), [], [], []
    runs: list[Run] = [Run(0, 0, 0, 0)] * len(prompts)
    last = [0] * len(prompts)
    for index in sorted(range(len(prompts)), key=lambda i: tuple(prompts[i])):
        path = tree.add(prompts[index])[cached[index] :]
        first = len(batch)
        numbers = [batch.number(node) for node in path]
        runs[index] = Run(slots[index], first, len(batch) - first, len(prompts[index]))
        last[index] = numbers[-1]
        write_slots += [slots[index]] * len(path)
        write_positions += range(cached[index], len(prompts[index]))
        write_tokens += numbers
    return Prefill(
        tokens=torch.tensor([tree.token_ids[node] for node in batch.nodes], device=device),
        positions=torch.tensor([tree.positions[node] for node in batch.nodes], device=device),
        runs=runs,
        last=torch.tensor(last, device=device),
        write_slots=torch.tensor(write_slots, device=device),
        write_positions=torch.tensor(write_positions, device=device),
        write_tokens=torch.tensor(write_tokens, device=device),
    )


class _Numbers:
    """Numbers nodes in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def number(self, node: int) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]


def plan_decode(
    tokens: Sequence[int],
    positions: Sequence[int],
    shared: tuple[list[int], list[int]] | None,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decode:
    """Lay out one token for each of the slots 0..len(tokens)-1.

    Args:
        tokens: Last token of each slot.
        positions: Position of that token in its sequence.
        shared: For slots with equal tokens: one slot for each row, and the row of each slot.
        capacity: Positions that a slot has room for.
        dtype: Dtype of the mask.
        device: Device of the tensors.
    """
    where = torch.tensor(positions, device=device)
    leaders, lines = shared or (list(range(len(tokens))), None)
    lengths = [positions[slot] + 1 for slot in leaders]
    common = common_view(lengths)
    view = min(capacity, -(-common // VIEW_STEP) * VIEW_STEP)
    rows = None if lines is None else torch.tensor(leaders, device=device)
    row_positions = where if rows is None else where[rows]
    hidden = torch.arange(view, device=device)[None] > row_positions[:, None]
    ids = torch.tensor(tokens, device=device)
    return Decode(
        tokens=ids if rows is None else ids[rows],
        positions=row_positions,
        rows=rows,
        lengths=lengths,
        view=view,
        mask=torch.zeros(len(leaders), view, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min),
        alone=[row for row, length in enumerate(lengths) if length > view],
        write_slots=torch.arange(len(tokens), device=device),
        write_positions=where,
        write_tokens=None if lines is None else torch.tensor(lines, device=device),
    )


def common_view(lengths: Sequence[int]) -> int:
    """Length up to which all rows are attended to together, so that the whole costs least; longer ones go alone."""
    best, cost, alone = 0, 0, 0
    for place, length in enumerate(sorted(lengths, reverse=True)):
        together = length * len(lengths) + alone
        if place == 0 or together < cost:
            best, cost = length, together
        alone += length + ROW_COST
    return best
