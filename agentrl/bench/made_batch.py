"""Makes batches from plain lists, for benchmarks and tests of the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.train.batch import TrainBatch
from agentrl.train.branches import Branch, TokenColumns


@dataclass(frozen=True)
class TrainSequence:
    """Sequence of one message, which makes one branch.

    Attributes:
        token_ids: ``[tokens]`` token ids.
        loss_mask: ``[tokens]`` 1 for trained tokens, else 0.
        logprobs: ``[tokens]`` behavior logprobs.
        advantages: ``[tokens]`` advantages; empty for zeros.
        weight: Weight of each of the sequence's tokens in the loss, before the batch's normalizer.
        versions: ``[tokens]`` policy versions that sampled the tokens; empty for zeros.
        group: Number of the sequence's group.
        values: ``[tokens]`` the critic's values; empty without a critic.
        returns: ``[tokens]`` returns, which are the critic's targets; empty without a critic.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    advantages: Sequence[float] = ()
    weight: float = 1.0
    versions: Sequence[int] = ()
    group: int = 0
    values: Sequence[float] = ()
    returns: Sequence[float] = ()


def made_tokens(sequences: Sequence[TrainSequence]) -> tuple[list[Branch], TokenColumns]:
    """Makes branches of the sequences with trained tokens, and columns of all sequences."""
    masks = [np.array(s.loss_mask, bool) for s in sequences]

    def column(name: str, dtype: type) -> np.ndarray:
        given = [getattr(s, name) or [0] * len(s.token_ids) for s in sequences]
        parts = [np.array(values, dtype)[mask] for values, mask in zip(given, masks, strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    starts = np.cumsum([0, *(len(s.token_ids) for s in sequences)])
    sampled_starts = np.cumsum([0, *(int(mask.sum()) for mask in masks)])
    sampled = {
        "behavior": column("logprobs", np.float32),
        "versions": column("versions", np.int32),
        "advantages": column("advantages", np.float32),
    }
    if any(s.returns for s in sequences):
        sampled |= {name: column(name, np.float32) for name in ("values", "returns")}
    tokens = TokenColumns(
        starts=starts,
        sampled_starts=sampled_starts,
        token_ids=np.array([t for s in sequences for t in s.token_ids], np.int32),
        loss_mask=np.concatenate(masks) if masks else np.empty(0, bool),
        sampled=sampled,
        places=sampled_starts[:-1],
        turns=np.zeros(len(sequences), np.int32),
        total=int(sampled_starts[-1]),
    )
    branches = [
        Branch((index,), (True,), index, s.group, s.weight, index)
        for index, (s, mask) in enumerate(zip(sequences, masks, strict=True))
        if mask.any()
    ]
    return branches, tokens


def made_batch(
    sequences: Sequence[TrainSequence], normalizer: float, signal: float = 1.0, version: int = 0
) -> TrainBatch:
    """Makes a batch of sequences; if any has returns, a critic learns from the batch."""
    branches, tokens = made_tokens(sequences)
    valued = branches if "returns" in tokens.sampled else []
    return TrainBatch(branches, tokens, normalizer, signal, version, valued)
