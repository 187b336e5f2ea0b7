"""Collects what a step computes of its tokens before the first update, and makes metrics of it.

Guarantees: metrics do not depend on ranks or micro-batches (the tokens of a sequence are put together); tokens stay on
the device until the step ends; one collective merges all ranks; a metric is absent where nothing was measured.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from agentrl.config.recipe import TrainerConfig
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.mismatch import SUMS, MeasuredTokens, mismatch_metrics, mismatch_sums


class Difference(NamedTuple):
    """A token whose logprob under the trainer's policy is not the server's.

    Attributes:
        sequence: Number of the token's sequence in the batch.
        position: Position of the token in the sequence, prompt included.
        token_id: Id of the token.
        behavior: Logprob that the server gave.
        trainer: Logprob under the trainer's policy.
    """

    sequence: int
    position: int
    token_id: int
    behavior: float
    trainer: float


class Differences(NamedTuple):
    """Tokens whose logprobs differ.

    Attributes:
        share: Share of such tokens among those that were measured.
        first: The first of them, by sequence and position.
    """

    share: float
    first: list[Difference]


_COLUMNS = ("behavior", "advantages", "versions", "sequences", "turns")


class Measured:
    """Tokens that this rank computed before the step's first update.

    Args:
        device: Device of the micro-batches.
        mesh: Mesh of the ranks.
    """

    def __init__(self, device: torch.device, mesh: RankMesh) -> None:
        self._device = device
        self._mesh = mesh
        self._parts: list[MeasuredTokens] = []
        self._positions: list[Tensor] = []  # of the same tokens, in their sequences

    def add(
        self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, *, chosen: Tensor | None = None,
        weighted: bool = False,
    ) -> None:  # fmt: skip
        """Adds tokens of a micro-batch.

        Args:
            batch: The micro-batch.
            logprobs: ``[tokens]`` logprobs under the policy that the step starts from.
            entropies: ``[tokens]`` its entropies.
            chosen: ``[tokens]`` indices among the micro-batch's trained tokens; ``None`` for all in order.
            weighted: Whether the column ``weights`` says how many tokens each stands for; else it is 1.
        """
        columns = {name: batch.columns[name] for name in (*_COLUMNS, "weights")}
        columns["token_ids"] = batch.targets[batch.trained]
        columns["positions"] = batch.positions.flatten()[batch.sources[batch.trained]] + 1
        if chosen is not None:
            columns = {name: values[chosen] for name, values in columns.items()}
        self._positions.append(columns["positions"])
        self._parts.append(
            MeasuredTokens(
                logprobs=logprobs.detach(),
                entropies=entropies.detach(),
                token_ids=columns["token_ids"],
                weights=columns["weights"] if weighted else torch.ones_like(columns["weights"]),
                **{name: columns[name] for name in _COLUMNS},
            )
        )

    def differences(self, beyond: float, most: int) -> Differences:
        """Finds the tokens whose log ratio is far from 0, the same on every rank; a collective.

        Args:
            beyond: Absolute log ratio from which a token is one of them.
            most: Largest number of tokens to return.
        """
        own, count = self._differences(beyond), sum(len(part.logprobs) for part in self._parts)
        every = self._from_all((own[:most], len(own), count))
        first = sorted(one for found, *_ in every for one in found)[:most]
        return Differences(sum(one[1] for one in every) / max(1, sum(one[2] for one in every)), first)

    def _differences(self, beyond: float) -> list[Difference]:
        found: list[Difference] = []
        for part, positions in zip(self._parts, self._positions, strict=True):
            far = ~((part.logprobs - part.behavior).abs() <= beyond)  # also true for NaN
            columns = (part.sequences, positions, part.token_ids, part.behavior, part.logprobs)
            found += [Difference(*one) for one in zip(*(column[far].tolist() for column in columns), strict=True)]
        return sorted(found)

    def sequences(self) -> list[int]:
        """Returns the numbers of the sequences of which a token was measured, the same on every rank; a collective."""
        own = sorted({one for part in self._parts for one in part.sequences.unique().tolist()})
        return sorted({one for found in self._from_all(own) for one in found})

    def of_sequences(self, chosen: Sequence[int]) -> NDArray[np.float64]:
        """Returns what was measured of some sequences, the same on every rank; a collective.

        Args:
            chosen: Numbers of the sequences.

        Returns:
            ``[tokens, 3]`` number of the sequence, position in it, logprob under the trainer, in this order.
        """
        wanted = torch.tensor(list(chosen), dtype=torch.long, device=self._device)
        own = [np.zeros((0, 3))]
        for part, positions in zip(self._parts, self._positions, strict=True):
            here = torch.isin(part.sequences, wanted)
            columns = (part.sequences, positions, part.logprobs)
            own.append(torch.stack([one[here].double() for one in columns], dim=1).cpu().numpy())
        found = np.concatenate(self._from_all(np.concatenate(own)))
        return found[np.lexsort((found[:, 1], found[:, 0]))]

    def _from_all(self, own: Any) -> list[Any]:
        group = self._mesh.tokens
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, own, group=group)
        return every

    def _whole_sequences(self) -> MeasuredTokens | None:
        """Returns the tokens; with context parallelism those of this rank's part of the sequences, a collective."""
        tokens = MeasuredTokens.joined(self._parts) if self._parts else None
        ranks = self._mesh.shape.context
        if ranks == 1:
            return tokens
        every: list[Any] = [None] * ranks
        own = None if tokens is None else {name: values.cpu() for name, values in vars(tokens).items()}
        dist.all_gather_object(every, own, group=self._mesh.context)
        parts = [MeasuredTokens(**{k: v.to(self._device) for k, v in one.items()}) for one in every if one is not None]
        if not parts:
            return None
        joined = MeasuredTokens.joined(parts)
        mine = joined.select(joined.sequences % ranks == self._mesh.context_rank)
        return mine if len(mine.logprobs) else None

    def metrics(self, config: TrainerConfig, version: int, sampled: float) -> dict[str, float]:
        """Computes the step's metrics from before its first update, the same on every rank; a collective.

        Args:
            config: The recipe's trainer section.
            version: Policy version that the step starts from.
            sampled: Number of tokens that the loss of the global batch counts.
        """
        sums = torch.zeros(4, len(SUMS), dtype=torch.float64, device=self._device)
        worst = torch.tensor([[0.0, -1.0]] * 4, dtype=torch.float64, device=self._device)
        tokens = self._whole_sequences()
        if tokens is not None:
            sums, worst = mismatch_sums(tokens, config, version)
        sums, worst = merged(sums, worst, self._mesh)
        total = dict(zip(SUMS, sums[0].tolist(), strict=True))
        if not total["tokens"]:
            return {}
        found = {
            "train/entropy": total["entropy"] / total["tokens"],
            "train/measured_share": total["measured"] / sampled,
        }
        return found | mismatch_metrics(sums, worst, config)


def merged(sums: Tensor, worst: Tensor, mesh: RankMesh) -> tuple[Tensor, Tensor]:
    """Merges all ranks' sums, and takes the largest of their maxima; a collective.

    Args:
        sums: ``[rows, sums]``.
        worst: ``[rows, 2]`` a maximum and what it belongs to.
        mesh: Mesh of the ranks.
    """
    own = torch.cat([sums, worst], dim=1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(mesh.tokens))]
    dist.all_gather(every, own, group=mesh.tokens)
    of_ranks = torch.stack(every)  # [ranks, rows, sums + 2]
    count = sums.shape[1]
    rank = of_ranks[:, :, count].argmax(0)
    return of_ranks[:, :, :count].sum(0), of_ranks[rank, torch.arange(len(own), device=own.device), count:]
