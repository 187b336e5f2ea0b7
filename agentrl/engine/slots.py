"""KV cache of the running requests, one slot each.

Guarantees: a slot's positions are contiguous in each layer, so slots 0..B-1 up to some length are a view; memory grows
in steps up to slots x context, so short workloads use little; positions that were never written are zeros, so a mask is
enough to hide them. The module depends on no request or model, only on the shapes of cache entries.
"""

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LENGTH_STEP = 128  # positions; storage grows to a multiple of it
SLOT_STEP = 8


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's cache entry per token: ``[kv_heads, key_dim]`` and ``[kv_heads, value_dim]`` of a dtype."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Piece:
    """A range of positions of one slot, in all layers.

    Attributes:
        keys: For each set of layers with equal shape, keys ``[layers, kv_heads, positions, key_dim]``.
        values: For each such set, values ``[layers, kv_heads, positions, value_dim]``.
    """

    keys: list[Tensor]
    values: list[Tensor]

    def part(self, start: int, end: int) -> "Piece":
        """Returns a copy of the positions from ``start`` to ``end``."""
        return Piece([k[:, :, start:end].clone() for k in self.keys], [v[:, :, start:end].clone() for v in self.values])


class SlotCache:
    """Keys and values of all slots, in all layers.

    Args:
        shapes: Shape of each layer's cache entry.
        max_slots: Most slots.
        context: Most positions of a slot.
    """

    def __init__(self, shapes: Sequence[LayerShape], max_slots: int, context: int) -> None:
        """Start without memory."""
        self.max_slots, self.context = max_slots, context
        self.slots = self.length = 0  # capacity
        self._kinds = list(dict.fromkeys(shapes))
        members = [[number for number, shape in enumerate(shapes) if shape == kind] for kind in self._kinds]
        self._where = {n: (kind, index) for kind, layers in enumerate(members) for index, n in enumerate(layers)}
        self._layers = [len(layers) for layers in members]
        self._keys: list[Tensor] = []  # of each kind: [layers, slots, kv_heads, length, dim]
        self._values: list[Tensor] = []

    def keys(self, layer: int) -> Tensor:
        """Keys of one layer, ``[slots, kv_heads, length, key_dim]``."""
        kind, index = self._where[layer]
        return self._keys[kind][index]

    def values(self, layer: int) -> Tensor:
        """Values of one layer, ``[slots, kv_heads, length, value_dim]``."""
        kind, index = self._where[layer]
        return self._values[kind][index]

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots and positions; growing copies the cache, so it grows by more than needed."""
        if slots <= self.slots and length <= self.length:
            return
        if slots > self.slots:
            grown = max(slots, self.slots * 3 // 2)
            slots = min(self.max_slots, -(-grown // SLOT_STEP) * SLOT_STEP)
        if length > self.length:
            grown = max(length, self.length * 5 // 4)
            length = min(self.context, -(-grown // LENGTH_STEP) * LENGTH_STEP)
        slots, length = max(slots, self.slots), max(length, self.length)
        self._keys = self._grown(self._keys, [kind.key_dim for kind in self._kinds], slots, length)
        self._values = self._grown(self._values, [kind.value_dim for kind in self._kinds], slots, length)
        self.slots, self.length = slots, length

    def _grown(self, old: list[Tensor], dims: list[int], slots: int, length: int) -> list[Tensor]:
        new = [
            zeros((layers, slots, kind.kv_heads, length, dim), kind.dtype, kind.device)
            for kind, layers, dim in zip(self._kinds, self._layers, dims, strict=True)
        ]
        for before, after in zip(old, new, strict=False):
            after[:, : self.slots, :, : self.length] = before
        return new

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store tokens.

        Args:
            layer: Index of the layer.
            slots: Slot of each token, int64 ``[tokens]``.
            positions: Position of each token, int64 ``[tokens]``.
            keys: ``[tokens, kv_heads, key_dim]``.
            values: ``[tokens, kv_heads, value_dim]``.
        """
        self.keys(layer)[slots, :, positions] = keys
        self.values(layer)[slots, :, positions] = values

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of one slot to others."""
        for store in (*self._keys, *self._values):
            for target in targets:
                store[:, target, :, :length] = store[:, source, :, :length]

    def read(self, slot: int, start: int, end: int) -> Piece:
        """Returns a copy of a slot's positions from ``start`` to ``end``."""
        return Piece(
            [store[:, slot, :, start:end].clone() for store in self._keys],
            [store[:, slot, :, start:end].clone() for store in self._values],
        )

    def restore(self, slot: int, start: int, piece: Piece, length: int) -> None:
        """Write the first ``length`` positions of a piece into a slot."""
        for stores, parts in ((self._keys, piece.keys), (self._values, piece.values)):
            for store, part in zip(stores, parts, strict=True):
                store[:, slot, :, start : start + length] = part[:, :, :length]

    def clear(self) -> None:
        """Free all memory; call it only while no request runs."""
        self.slots = self.length = 0
        self._keys, self._values = [], []

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in all layers."""
        return sum(
            layers * kind.kv_heads * (kind.key_dim + kind.value_dim) * kind.dtype.itemsize
            for kind, layers in zip(self._kinds, self._layers, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Reserved bytes; on Linux CPUs only written pages take memory."""
        return self.slots * self.length * self.token_bytes


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of zeros; on Linux CPUs only its written pages take memory."""
    if device.type != "cpu" or sys.platform != "linux":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = math.prod(shape)
    if not count:
        return torch.zeros(*shape, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(*shape)


@torch.inference_mode()
def layer_shapes(model: Any, layers: int) -> list[LayerShape]:
    """Finds the cache shapes of a model's layers by a forward pass over one token."""
    from transformers import DynamicCache

    cache = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    model(input_ids=token, cache=cache, use_cache=True)
    found = []
    for layer in cache.layers[:layers]:
        keys, values = (getattr(layer, name) for name in ("keys", "values"))
        found.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
    return found
