"""The trained tokens of a global batch as columns, the same on every rank.

Guarantees: a token's place follows from the order of the sequences alone, so ranks, rows and micro-batches agree on it;
what looks at several tokens (a sequence's ratio, a mask over the batch) sees all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.train.packing import TrainSequence


@dataclass
class TokenTable:
    """Columns of ``[tokens]``.

    Attributes:
        behavior: Logprobs of the policies that sampled.
        advantages: Of each token.
        weights: In the loss, before the normalizer.
        sequences: int64, which sequence a token belongs to.
        versions: int64, policy version that sampled it.
        proximal: Logprobs of the policy that the step starts from, where they were computed.
        kept: bool, whether a token takes part, where a mask was made.
    """

    behavior: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor
    versions: Tensor
    proximal: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence], device: torch.device) -> "TokenTable":
        """All trained tokens, sequence by sequence."""
        behavior: list[float] = []
        advantages: list[float] = []
        versions: list[int] = []
        counts: list[int] = []
        for sequence in sequences:
            positions = [position for position, trained in enumerate(sequence.loss_mask) if trained]
            behavior += [sequence.logprobs[position] for position in positions]
            advantages += [sequence.advantages[position] if sequence.advantages else 0.0 for position in positions]
            versions += [sequence.versions[position] if sequence.versions else 0 for position in positions]
            counts.append(len(positions))
        repeats = torch.tensor(counts, dtype=torch.long, device=device)

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            behavior=column(behavior),
            advantages=column(advantages),
            weights=column([sequence.weight for sequence in sequences]).repeat_interleave(repeats),
            sequences=torch.arange(len(sequences), device=device).repeat_interleave(repeats),
            versions=torch.tensor(versions, dtype=torch.long, device=device),
        )

    def __len__(self) -> int:
        return len(self.behavior)
