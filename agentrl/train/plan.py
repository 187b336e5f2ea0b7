"""Which sequences an update takes, and which rows of them this rank computes.

Guarantees: all ranks derive the same plan from the same sequences; an update takes whole groups.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from agentrl.train.packing import Row, TrainSequence, attention_span, build_rows, plan_microbatches


def plan_rows(
    model: Any, sequences: Sequence[TrainSequence], budget: int, firsts: Sequence[int] | None = None
) -> tuple[list[Row], list[list[Row]]]:
    """All rows of some sequences, and this rank's micro-batches.

    Args:
        model: The Hugging Face model that computes them; says what attention costs.
        sequences: The same on every rank.
        budget: Tokens of a micro-batch.
        firsts: Place of each sequence's first trained token in the table; by default one after the other.
    """
    span = attention_span(model.config.get_text_config().hidden_size)
    rows = build_rows(sequences, budget, span, firsts)
    return rows, plan_microbatches(rows, dist.get_world_size(), budget)[dist.get_rank()]


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
