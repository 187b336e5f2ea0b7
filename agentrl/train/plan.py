"""Which sequences an update takes, and which rows of them this rank computes.

Guarantees: all ranks derive the same plan from the same sequences; an update takes whole groups.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from agentrl.train.microbatches import plan_microbatches
from agentrl.train.packed import collate_packed
from agentrl.train.packing import Row, TrainSequence, attention_span, build_rows
from agentrl.train.policy import MicroBatch, collate


def plan_rows(
    model: Any,
    sequences: Sequence[TrainSequence],
    budget: int,
    firsts: Sequence[int] | None = None,
    *,
    packed: bool = False,
) -> tuple[list[Row], list[list[Row]]]:
    """All rows of some sequences, and this rank's micro-batches.

    Args:
        model: The Hugging Face model that computes them; says what attention costs.
        sequences: The same on every rank.
        budget: Tokens of a micro-batch.
        firsts: Place of each sequence's first trained token in the table; by default one after the other.
        packed: Rows of a micro-batch are laid end to end; see :func:`~agentrl.train.packed.choose_attention`.
    """
    span = attention_span(model.config.get_text_config().hidden_size)
    rows = build_rows(sequences, budget, math.inf if packed else span, firsts)
    return rows, plan_microbatches(rows, dist.get_world_size(), budget, span, packed=packed)[dist.get_rank()]


def collate_rows(rows: Sequence[Row], device: torch.device, *, packed: bool) -> MicroBatch:
    """A micro-batch's rows as tensors: end to end, or padded."""
    return collate_packed(rows, device) if packed else collate(rows, device)


def share_out(sequences: Sequence[TrainSequence], parts: int) -> list[list[int]]:
    """Indices of sequences in up to ``parts`` shares (at least one) of whole groups, with about as many tokens each."""
    sizes: dict[int, int] = {}
    for sequence in sequences:
        sizes[sequence.group] = sizes.get(sequence.group, 0) + len(sequence.token_ids)
    loads = [0] * max(1, min(parts, len(sizes)))
    share: dict[int, int] = {}
    for group in sorted(sizes, key=lambda g: sizes[g], reverse=True):
        share[group] = loads.index(min(loads))
        loads[share[group]] += sizes[group]
    return [[i for i, s in enumerate(sequences) if share[s.group] == number] for number in range(len(loads))]
