"""Context parallelism: the ranks of a context group share the tokens of each packed micro-batch.

Guarantees: each token is computed by one rank of the group, with its own position and the keys and values of its own
path, so that losses, metrics and gradients are those of one rank up to rounding; any number of heads and any tree.

The forest is cut into the blocks of :mod:`agentrl.train.tree_attention` (on CUDA: of ``flex_attention``), and these
are dealt by their cost. In each layer keys and values of all tokens are gathered, which is little with grouped heads;
queries stay where they are. A loss that needs whole sequences gets their logprobs by one more exchange.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agentrl.train.branches import Branch, TokenColumns
from agentrl.train.layout import Packed
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.microbatches import MicroBatches
from agentrl.train.row_attention import BLOCK, block_mask
from agentrl.train.rows import Row, RowArrays
from agentrl.train.shared_keys import Gather, SharedMask
from agentrl.train.tree_attention import OwnTiles, blocks

ROUND = 32  # tokens to which a rank's part is rounded up


@dataclass(frozen=True)
class Deal:
    """The tokens of each rank of a group.

    Attributes:
        owner: int64 ``[tokens]`` rank of each token.
        local: int64 ``[tokens]`` its place among the tokens of that rank.
        most: Tokens of each rank, padding included.
    """

    owner: Tensor
    local: Tensor
    most: int

    @property
    def gathered(self) -> Tensor:
        """int64 ``[tokens]`` place of each token when the parts of all ranks are gathered."""
        return self.owner * self.most + self.local


def deal(parts: Sequence[range], costs: Sequence[float], ranks: int, unit: int) -> Deal:
    """Deals ranges of tokens to ranks, the costliest first, each to the rank with the least cost so far.

    Args:
        parts: Ranges that together are all tokens.
        costs: Cost of each.
        ranks: Ranks of the group.
        unit: Number whose multiple each rank's number of tokens is rounded to.
    """
    total = sum(map(len, parts))
    owner, local = torch.empty(total, dtype=torch.long), torch.empty(total, dtype=torch.long)
    loads, counts = [0.0] * ranks, [0] * ranks
    chosen: list[list[range]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(parts)), key=costs.__getitem__, reverse=True):
        rank = min(range(ranks), key=lambda one: (loads[one], counts[one]))
        loads[rank] += costs[number]
        counts[rank] += len(parts[number])
        chosen[rank].append(parts[number])
    for rank, mine in enumerate(chosen):
        first = 0
        for part in sorted(mine, key=lambda one: one.start):
            owner[part.start : part.stop] = rank
            local[part.start : part.stop] = torch.arange(first, first + len(part))
            first += len(part)
    return Deal(owner, local, max(1, -(-max(counts) // unit)) * unit)


@dataclass(frozen=True)
class Sequences:
    """Exchange of a micro-batch's logprobs, after which a rank has all of some sequences.

    Attributes:
        batch: The micro-batch with the trained tokens of this rank's sequences; only its tokens, no mask.
        order: int64 ``[trained]`` place of each of these when the parts of all ranks are gathered.
        most: Trained tokens of each rank, padding included.
    """

    batch: MicroBatch
    order: Tensor
    most: int


@dataclass(frozen=True, kw_only=True)
class SharedBatch(MicroBatch):
    """A rank's part of a micro-batch, padded to the length of the longest part.

    Attributes:
        sequences: Exchange for what needs whole sequences.
        group: Ranks that share the micro-batch.
    """

    sequences: Sequences
    group: dist.ProcessGroup

    def whole_sequences(self, *values: Tensor) -> tuple[MicroBatch, tuple[Tensor, ...]]:
        """Exchanges numbers of trained tokens; a collective over the group.

        Args:
            values: ``[trained]`` each.

        Returns:
            The micro-batch with this rank's sequences, and the numbers of their trained tokens.
        """
        own = torch.stack(values, 1)
        padded = torch.cat([own, own.new_zeros(self.sequences.most - len(own), own.shape[1])])
        every = Gather.apply(padded, self.group)[self.sequences.order]  # type: ignore[index]
        return self.sequences.batch, tuple(every.unbind(1))


class SharedTokens(Packed):
    """Packed layout whose micro-batches are shared by the ranks of a context group.

    Args:
        span: Row length in tokens at which dense attention would cost as much as the rest of the model.
        mesh: Mesh of the ranks.
    """

    def __init__(self, span: float, mesh: RankMesh, *, blocks: bool | None = None) -> None:
        super().__init__(span, blocks=blocks)
        self._mesh = mesh

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """Builds rows of the tokens that all ranks of the group may compute together."""
        return super().rows(branches, tokens, budget * self._mesh.shape.context)

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """Plans micro-batches of the tokens that all ranks of the group may compute together."""
        return super().plan(rows, ranks, budget * self._mesh.shape.context)

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """Makes this rank's part of the micro-batch of the given rows."""
        whole = super().tensors(rows, tokens, device)
        assert isinstance(whole.mask, _Forest)
        forest, rank, ranks = whole.mask, self._mesh.context_rank, self._mesh.shape.context
        if forest.blocks:
            dealt, mask = self._flex(forest.ends, rank, ranks)
        else:
            dealt, mask = self._tiles(forest.ends, rank, ranks)
        return _part(whole, dealt, rank, mask, self._mesh.context)

    def masks(self, ends: Tensor, positions: Tensor, *, blocks: bool) -> BlockMask:
        """Keeps the forest: the mask is made for this rank's tokens alone."""
        return _Forest(ends, blocks)

    def _tiles(self, ends: Tensor, rank: int, ranks: int) -> tuple[Deal, BlockMask]:
        found = blocks(ends.tolist())
        costs = [len(block) * (1 + block.keys / self._span) for block in found]
        dealt = deal([range(block.start, block.end) for block in found], costs, ranks, ROUND)
        mine = [block for block in found if int(dealt.owner[block.start]) == rank]
        tiles = OwnTiles(ends, mine, dealt.local, dealt.gathered, rank * dealt.most, dealt.most)
        return dealt, SharedMask(tiles, None, self._mesh.context)

    def _flex(self, ends: Tensor, rank: int, ranks: int) -> tuple[Deal, BlockMask]:
        """Deals ``flex_attention``'s blocks of queries; each rank gets as many, the last ones may be of padding."""
        short = -len(ends) % (BLOCK * ranks)
        ends = torch.cat([ends, torch.arange(len(ends), len(ends) + short, device=ends.device) + 1])
        whole = block_mask(ends)
        seen = (whole.kv_num_blocks + whole.full_kv_num_blocks)[0, 0].tolist()  # type: ignore[operator]
        order = sorted(range(len(seen)), key=seen.__getitem__, reverse=True)
        owner = torch.empty(len(seen), dtype=torch.long)
        for place, block in enumerate(order):  # there and back, so that all get as many blocks and similar costs
            turn, at = divmod(place, ranks)
            owner[block] = at if turn % 2 == 0 else ranks - 1 - at
        place = torch.empty_like(owner)
        for one in range(ranks):
            place[owner == one] = torch.arange(int((owner == one).sum()))
        most = len(ends) // ranks
        within = torch.arange(BLOCK)
        dealt = Deal(owner.repeat_interleave(BLOCK), (place[:, None] * BLOCK + within).flatten(), most)
        own = torch.nonzero(owner == rank)[:, 0].to(ends.device)
        return dealt, SharedMask(block_mask(ends, own), dealt.gathered.to(ends.device), self._mesh.context)


def _part(whole: MicroBatch, dealt: Deal, rank: int, mask: BlockMask, group: dist.ProcessGroup) -> SharedBatch:
    """Cuts a rank's part out of a micro-batch."""
    device, ranks = whole.token_ids.device, dist.get_world_size(group)
    owner, local = dealt.owner.to(device), dealt.local.to(device)
    own = torch.nonzero(owner[: whole.token_ids.numel()] == rank)[:, 0]

    def cut(tokens: Tensor) -> Tensor:
        part = tokens.new_zeros(dealt.most)
        part[local[own]] = tokens.flatten()[own]
        return part[None]

    of_prediction = owner[whole.sources]
    predictions = torch.nonzero(of_prediction == rank)[:, 0]
    number = torch.empty_like(of_prediction)
    number[predictions] = torch.arange(len(predictions), device=device)
    of_token = of_prediction[whole.trained]
    trained = torch.nonzero(of_token == rank)[:, 0]
    return SharedBatch(
        token_ids=cut(whole.token_ids),
        positions=cut(whole.positions),
        mask=mask,
        sources=local[whole.sources[predictions]],
        targets=whole.targets[predictions],
        trained=number[whole.trained[trained]],
        places=whole.places[trained],
        columns={name: values[trained] for name, values in whole.columns.items()},
        sequences=_sequences(whole, of_token, rank, ranks),
        group=group,
    )


def _sequences(whole: MicroBatch, of_token: Tensor, rank: int, ranks: int) -> Sequences:
    """Plans the exchange after which each rank has all trained tokens of every ``ranks``-th sequence."""
    within = torch.empty_like(of_token)
    most = 1
    for one in range(ranks):
        its = torch.nonzero(of_token == one)[:, 0]
        within[its] = torch.arange(len(its), device=its.device)
        most = max(most, len(its))
    _, number = whole.columns["sequences"].unique(return_inverse=True)
    chosen = torch.nonzero(number % ranks == rank)[:, 0]
    batch = replace(
        whole,
        trained=whole.trained[chosen],
        places=whole.places[chosen],
        columns={name: values[chosen] for name, values in whole.columns.items()},
    )
    return Sequences(batch, of_token[chosen] * most + within[chosen], most)


class _Forest(BlockMask):
    """The ``ends`` of a forest, in the place of its mask."""

    def __init__(self, ends: Tensor, blocks: bool) -> None:
        self.ends = ends
        self.blocks = blocks

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """``[1, 1, tokens, tokens]``."""
        return (1, 1, len(self.ends), len(self.ends))

    def __repr__(self) -> str:
        return f"_Forest(tokens={len(self.ends)})"
