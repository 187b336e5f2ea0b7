"""Attention over a forest of prefix trees on a CPU: blocks of queries, each with the keys of its own path.

Guarantees: equals attention with the forest's dense mask; masked pairs are computed only inside a block. Scores and
softmax are float32 for any input dtype; probabilities are computed again in the backward pass, so the memory kept for
it is linear in the number of tokens.

It exists because torch's ``flex_attention`` has no backward pass on a CPU, and torch's attention with a dense mask
computes every pair.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agentrl.models.tree_mask import Reach

QUERIES = 128  # most tokens of a block; a longer chain is cut into several, and each sees the previous ones
SMALL = 64  # a subtree of at most so many tokens is one block, with a mask inside
TILE = 200_000  # scores of one head that are computed together, so that they stay in the cache
HIDDEN = -1e30  # bias of a masked key; finite, so that a fully masked row does not give NaN


@dataclass(frozen=True)
class Block:
    """A range of nodes, and the earlier nodes that all of them see.

    Attributes:
        start: First node.
        end: Index after the last node.
        path: Ranges of earlier nodes that all nodes of the block see, in ascending order.
    """

    start: int
    end: int
    path: tuple[range, ...]

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def keys(self) -> int:
        """Number of keys: those of the path and of the block itself."""
        return len(self) + sum(map(len, self.path))


@dataclass(frozen=True)
class Tile:
    """Blocks of similar sizes, padded to the largest.

    Attributes:
        queries: int64 ``[blocks * most queries]`` node of each query; 0 for padding.
        keys: int64 ``[blocks * most keys]`` node of each key; 0 for padding.
        bias: float32 ``[blocks, 1, most queries, most keys]``, added to the scores.
        used: float32 ``[blocks, 1, 1, most queries, 1]``, 1 for a query and 0 for padding; None without padding.
    """

    queries: Tensor
    keys: Tensor
    bias: Tensor
    used: Tensor | None


class TreeTiles(BlockMask):
    """The plan of :func:`tree_attention`, which is passed to a model as its attention mask.

    It is a :class:`BlockMask` only because transformers passes on such a mask of four axes unchanged.

    Args:
        ends: int64 ``[length]`` index after each node's last descendant, see
            :class:`~agentrl.models.prefix_tree.PrefixTree`.
        positions: int64 ``[length]`` depth of each node; needed for a limited reach.
        reach: Reach of tokens along their branch; ``None`` for all of it.
    """

    def __init__(self, ends: Tensor, positions: Tensor | None = None, reach: Reach | None = None) -> None:
        self.length = len(ends)
        limited = None if reach is None or not reach.limited or positions is None else (positions, reach)
        found = blocks(ends.tolist())
        if limited is not None and limited[1].window is not None:
            found = [_within(block, limited[0], limited[1].window) for block in found]
        self.tiles, self.places = self._planned(found, ends, limited)

    @staticmethod
    def _planned(
        found: Sequence[Block], ends: Tensor, limited: tuple[Tensor, Reach] | None = None
    ) -> tuple[list[Tile], Tensor]:
        """Makes the tiles of some blocks, and the place of each of their nodes in the tiles' results."""
        ordered = sorted(found, key=lambda block: (len(block), block.keys), reverse=True)
        tiles: list[Tile] = []
        places = torch.empty(len(ends), dtype=torch.long)
        first = 0
        for one in _cut(ordered):
            tile = _tile(one, ends, limited)
            for index, block in enumerate(one):
                start = first + index * len(one[0])
                places[block.start : block.end] = torch.arange(start, start + len(block))
            first += len(tile.queries)
            tiles.append(tile)
        return tiles, places

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """``[1, 1, queries, keys]``."""
        return (1, 1, self.length, self.length)

    def __repr__(self) -> str:
        return f"TreeTiles(length={self.length}, tiles={len(self.tiles)})"


class OwnTiles(TreeTiles):
    """Tiles of the queries of one of several ranks, over the keys of all of them.

    Args:
        ends: int64 ``[length]`` index after each node's last descendant.
        own: Blocks of this rank.
        local: int64 ``[length]`` place of each node among the tokens of its rank.
        gathered: int64 ``[length]`` place of each node when the tokens of all ranks are gathered.
        first: Place of this rank's first token there.
        most: Number of this rank's tokens; those after its nodes are padding, and attend to themselves.
    """

    def __init__(
        self, ends: Tensor, own: Sequence[Block], local: Tensor, gathered: Tensor, first: int, most: int
    ) -> None:
        used, nodes = sum(map(len, own)), len(ends)
        filled = torch.arange(used, most)  # padding is further nodes, each a tree
        ends = torch.cat([ends, nodes + 1 + torch.arange(most - used)])
        local, gathered = torch.cat([local, filled]), torch.cat([gathered, first + filled])
        padding = [Block(at, min(at + SMALL, len(ends)), ()) for at in range(nodes, len(ends), SMALL)]
        tiles, places = self._planned([*own, *padding], ends)
        mine = torch.cat([torch.arange(block.start, block.end) for block in (*own, *padding)])
        self.length = most
        self.tiles = [replace(tile, queries=local[tile.queries], keys=gathered[tile.keys]) for tile in tiles]
        self.places = torch.empty(most, dtype=torch.long)
        self.places[local[mine]] = places[mine]


def blocks(ends: Sequence[int]) -> list[Block]:
    """Cuts a forest into blocks; every node is in exactly one."""
    found: list[Block] = []
    waiting: list[tuple[int, int, tuple[range, ...]]] = [(0, len(ends), ())]  # sibling subtrees, and their path
    while waiting:
        start, end, path = waiting.pop()
        first = node = start  # small neighboring subtrees from ``first`` on are one block
        while node < end:
            after = ends[node]
            if after - first > SMALL and node > first:
                found.append(Block(first, node, path))
                first = node
            if after - node > SMALL:
                split = node + 1
                while split < after and ends[split] == after:
                    split += 1
                for piece in range(node, split, QUERIES):
                    before = (range(node, piece),) if piece > node else ()
                    found.append(Block(piece, min(piece + QUERIES, split), path + before))
                if split < after:
                    waiting.append((split, after, (*path, range(node, split))))
                first = after
            node = after
        if first < end:
            found.append(Block(first, end, path))
    return found


def _cut(ordered: Sequence[Block]) -> list[list[Block]]:
    """Cuts sorted blocks into tiles with the lowest total cost: padded scores, and a fixed cost per tile."""
    # Cost of one more tile, in scores of one head.
    one_more = 8_000
    least = [0] * (len(ordered) + 1)
    ends = [0] * len(ordered)
    for start in reversed(range(len(ordered))):
        queries, keys, best = len(ordered[start]), 0, None
        for end in range(start + 1, len(ordered) + 1):
            keys = max(keys, ordered[end - 1].keys)
            scores = (end - start) * queries * keys
            if best is not None and scores > TILE:
                break
            cost = one_more + scores + least[end]
            if best is None or cost <= best:
                best, ends[start] = cost, end
        least[start] = best or 0
    tiles = []
    start = 0
    while start < len(ordered):
        tiles.append(list(ordered[start : ends[start]]))
        start = ends[start]
    return tiles


def _within(block: Block, positions: Tensor, window: int) -> Block:
    """Drops those nodes of a block's path that none of its nodes has in its window."""
    first = int(positions[block.start : block.end].min()) - window + 1
    path = []
    for part in block.path:  # a range of a path is a chain: its positions are consecutive
        start = part.start + max(0, first - int(positions[part.start]))
        if start < part.stop:
            path.append(range(start, part.stop))
    return Block(block.start, block.end, tuple(path))


def _tile(members: Sequence[Block], ends: Tensor, limited: tuple[Tensor, Reach] | None) -> Tile:
    most_queries, most_keys = max(map(len, members)), max(block.keys for block in members)
    queries = torch.zeros(len(members), most_queries, dtype=torch.long)
    keys = torch.zeros(len(members), most_keys, dtype=torch.long)
    used = torch.zeros(len(members), most_queries)
    exists = torch.zeros(len(members), most_keys, dtype=torch.bool)
    for index, block in enumerate(members):
        queries[index, : len(block)] = torch.arange(block.start, block.end)
        used[index, : len(block)] = 1.0
        ranges = (*block.path, range(block.start, block.end))
        keys[index, : block.keys] = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
        exists[index, : block.keys] = True
    query, key = queries[:, :, None], keys[:, None, :]
    seen = (key <= query) & (query < ends[keys][:, None, :]) & exists[:, None, :]
    if limited is not None:
        positions, reach = limited
        seen &= reach.sees(positions[query], positions[key])
    bias = torch.zeros(seen.shape).masked_fill_(~seen, HIDDEN)
    return Tile(
        queries=queries.flatten(),
        keys=keys.flatten(),
        bias=bias[:, None],
        used=None if bool(used.all()) else used[:, None, None, :, None],
    )


class _TreeAttention(torch.autograd.Function):
    """Takes queries ``[length, heads, size]``, and keys and values ``[length, key heads, size]``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: TreeTiles, scale: float) -> Tensor:
        parts = [_Inputs(tile, query, key, value, scale) for tile in mask.tiles]
        out = torch.cat([one.back(one.probabilities().to(query.dtype) @ one.value) for one in parts])[mask.places]
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        dtype = query.dtype
        grad_key = torch.zeros(key.shape, dtype=torch.float32)
        grad_value = torch.zeros(value.shape, dtype=torch.float32)
        grads_query = []
        for tile in ctx.mask.tiles:
            one = _Inputs(tile, query, key, value, ctx.scale)
            above = one.folded(grad, dtype)
            if tile.used is not None:
                above.view(*one.shape, -1).mul_(tile.used)
            probabilities = one.probabilities()
            grad_value.index_add_(0, tile.keys, one.key_back(probabilities.to(dtype).transpose(1, 2) @ above))
            scores = torch.ops.aten._softmax_backward_data(
                (above @ one.value.transpose(1, 2)).float(), probabilities, -1, torch.float32
            ).to(dtype)
            grads_query.append(one.back(scores @ one.key.to(dtype)))
            grad_key.index_add_(0, tile.keys, one.key_back(scores.transpose(1, 2) @ one.query.to(dtype)))
        grad_query = torch.cat(grads_query)[ctx.mask.places] * ctx.scale
        return grad_query, grad_key.to(dtype), grad_value.to(dtype), None, None


class _Inputs:
    """A tile's queries ``[blocks * key heads, group * most queries, size]``, keys and values."""

    def __init__(self, tile: Tile, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        self.tile = tile
        count = len(tile.bias)
        self.shape = (count, key.shape[1], query.shape[1] // key.shape[1], len(tile.queries) // count)
        self.query = self.folded(query, torch.float32).mul_(scale)
        self.key = self._keys(key).float()
        self.value = self._keys(value)

    def folded(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Gathers ``[length, heads, size]`` into the shape of ``query``."""
        count, groups, members, queries = self.shape
        found = tokens[self.tile.queries].view(count, queries, groups, members, -1).permute(0, 2, 3, 1, 4)
        return torch.empty(found.shape, dtype=dtype).copy_(found).view(count * groups, members * queries, -1)

    def _keys(self, tokens: Tensor) -> Tensor:
        count, groups, *_ = self.shape
        found = tokens[self.tile.keys]
        return found.view(count, -1, groups, found.shape[-1]).transpose(1, 2).flatten(0, 1)

    def probabilities(self) -> Tensor:
        """Computes float32 ``[blocks * key heads, group * most queries, most keys]`` probabilities."""
        count, groups, members, queries = self.shape
        scores = self.query @ self.key.transpose(1, 2)
        scores.view(count, groups * members, queries, -1).add_(self.tile.bias)
        return scores.softmax(-1)

    def back(self, folded: Tensor) -> Tensor:
        """Reshapes a tensor in the shape of ``query`` to ``[blocks * most queries, heads, size]``."""
        count, groups, members, queries = self.shape
        return folded.view(*self.shape, -1).permute(0, 3, 1, 2, 4).reshape(count * queries, groups * members, -1)

    def key_back(self, folded: Tensor) -> Tensor:
        """Reshapes a tensor in the shape of ``key`` to float32 ``[blocks * most keys, key heads, size]``."""
        count, groups, *_ = self.shape
        return folded.unflatten(0, (count, groups)).transpose(1, 2).float().flatten(0, 1)


_opaque: Callable[..., Tensor] = torch.compiler.disable(_TreeAttention.apply)  # type: ignore[assignment]


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: TreeTiles, scale: float) -> Tensor:
    """Computes the attention of each node over itself and its ancestors.

    Args:
        query: ``[length, heads, size]``.
        key: ``[length, key heads, size]``; ``heads`` is a multiple of ``key heads``.
        value: ``[length, key heads, size]``.
        mask: Tiles of the forest.
        scale: Factor on the scores.

    Returns:
        ``[length, heads, size]``, differentiable.
    """
    return _opaque(query, key, value, mask, scale)
