"""Layout of one forward pass: its tokens, and the slots from which it reads and to which it writes keys and values.

Guarantees: there is no padding; the common beginning of several prompts is computed once; the attention of a request
costs as much as its own length needs, whatever runs beside it. Both kinds of batch are plain data, and both forward
passes read them: the fast path (:mod:`~agentrl.engine.attention`) and the model's own
(:mod:`~agentrl.engine.own_forward`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.models.prefix_tree import PrefixTree

VIEW_STEP = 16  # the common view of a decode step is a multiple of so many positions: aligned rows, few shapes
ROW_COST = 256  # fixed cost of attention for one row by itself, in positions


@dataclass(frozen=True)
class Run:
    """Consecutive tokens in the batch: those of one prompt that no earlier prompt shares.

    Attributes:
        slot: Slot with the keys and values of the whole prompt.
        first: Index of the first token in the batch.
        count: Number of tokens; 0 if another prompt has all of them.
        length: Number of tokens in the slot, the last one of the run included.
    """

    slot: int
    first: int
    count: int
    length: int


@dataclass(frozen=True)
class Prefill:
    """Layout of a prefill: the tokens to compute for some prompts.

    Attributes:
        tokens: Token ids, int64 ``[tokens]``.
        positions: Position of each token in its prompt, int64 ``[tokens]``.
        runs: One run per prompt.
        last: Index in the batch of each prompt's last token, int64 ``[prompts]``.
        write_slots: Slots to write to, int64 ``[writes]``; a token that two prompts share is written twice.
        write_positions: Position of each write in its slot, int64 ``[writes]``.
        write_tokens: Batch index of the token of each write, int64 ``[writes]``.
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
    """Layout of a decode step: one token for each of the slots 0..slots-1; equal slots share one row.

    Attributes:
        tokens: Token ids, int64 ``[rows]``.
        positions: Position of each token in its sequence, int64 ``[rows]``.
        rows: Slot that each row attends to, int64 ``[rows]``; ``None``: row ``i`` is slot ``i``.
        lengths: Number of positions that each row attends to.
        view: Number of positions that all rows attend to together, through ``mask``.
        mask: Attention mask, ``[rows, view]``, added to the scores.
        alone: Rows that are longer than the view; their attention is computed row by row.
        write_slots: Slot of each write, int64 ``[slots]``.
        write_positions: Position of each write in its slot, int64 ``[slots]``.
        write_tokens: Row that computes each slot's token, int64 ``[slots]``; ``None``: row ``i`` is slot ``i``.
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
    """Lay out prompts whose leading tokens may already be in their slots.

    Args:
        prompts: Token ids of each prompt.
        slots: Slot of each prompt.
        cached: Number of leading tokens in the slot, less than the prompt's length. If two prompts share more than the
            cached tokens of one, the other must have as many or be a beginning of it: both come from one prefix tree.
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
    """Numbers nodes in the order of their first request."""

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
        positions: Position of each last token in its sequence.
        shared: For slots with equal tokens: one slot for each row, and the row of each slot.
        capacity: Number of positions in a slot.
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
    """Chooses the length up to which rows share one attention call, for the lowest total cost; longer rows go alone."""
    best, cost, alone = 0, 0, 0
    for place, length in enumerate(sorted(lengths, reverse=True)):
        together = length * len(lengths) + alone
        if place == 0 or together < cost:
            best, cost = length, together
        alone += length + ROW_COST
    return best
