"""Key/value memory of the running requests, as a cache that transformers models accept.

Guarantees: row s of each layer belongs to slot s; a decode step over B requests works on views of rows 0..B-1 up to
the longest length, without copies; memory grows in steps up to slots x context and no short workload pays for a long
one; positions beyond a row's length hold finite numbers, so a mask is enough to hide them.

How: the runner says what comes (:meth:`SlotCache.begin_prefill`, :meth:`SlotCache.begin_decode`) and every layer of
the model then calls ``update``.
"""

import math
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

LENGTH_STEP = 128  # positions; storage grows to a multiple of it
VIEW_STEP = 16  # positions; the view of a decode step is a multiple of it: aligned rows, few shapes
SLOT_STEP = 8


class Plan:
    """What the coming forward pass writes; shared by all layers.

    Attributes:
        slots: Capacity in slots that storage must have.
        length: Capacity in positions that storage must have.
        prompts: Slot of each prompt of a prefill and where its tokens lie in the input; empty in a decode step.
        before: Keys and values of each layer that come before all these prompts, ``[kv_heads, before, head_dim]``.
        rows: Slots of a decode step, int64 [batch].
        positions: Where each slot's new token goes, int64 [batch].
        twins: For each slot the row of the input that computes its token, int64 [batch]; None: each its own.
        leaders: Slot that each row of the input attends to, int64 [rows]; None like ``twins``.
        view: Positions that a decode step attends to.
    """

    def __init__(self) -> None:
        """Nothing planned."""
        self.slots = 0
        self.length = 0
        self.prompts: list[tuple[int, Tensor]] = []
        self.before: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.rows = self.positions = torch.empty(0, dtype=torch.long)
        self.twins: Tensor | None = None
        self.leaders: Tensor | None = None
        self.view = 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, kv_heads, length, head_dim].

    Args:
        plan: The cache's plan.
        number: Which layer it is.
    """

    is_sliding = False

    def __init__(self, plan: Plan, number: int) -> None:
        """Allocate nothing yet."""
        super().__init__()
        self._plan = plan
        self._number = number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate or grow storage to the plan's capacity; zeros, because a mask does not hide NaN."""
        self.keys = self._grown(self.keys, key_states)
        self.values = self._grown(self.values, value_states)
        self.is_initialized = True

    def _grown(self, old: Tensor | None, like: Tensor) -> Tensor:
        plan = self._plan
        if old is not None and old.shape[0] >= plan.slots and old.shape[2] >= plan.length:
            return old
        new = zeros(like, (plan.slots, like.shape[1], plan.length, like.shape[3]))
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new states and return what the queries attend to.

        Args:
            key_states: [1, kv_heads, all prompts, head_dim] in a prefill, [rows, kv_heads, 1, head_dim] in a decode
                step.
            value_states: The same shape, head_dim may differ.
            args: Ignored.
            kwargs: Ignored.

        Returns:
            Keys and values, [rows, kv_heads, attended, head_dim].
        """
        self.lazy_initialization(key_states, value_states)
        plan = self._plan
        assert self.keys is not None and self.values is not None
        if plan.prompts:
            return self._store_prompts(self.keys, key_states, 0), self._store_prompts(self.values, value_states, 1)
        batch = len(plan.rows)
        new_keys, new_values = key_states[:, :, 0], value_states[:, :, 0]
        if plan.twins is not None:
            new_keys, new_values = new_keys[plan.twins], new_values[plan.twins]
        self.keys[plan.rows, :, plan.positions] = new_keys
        self.values[plan.rows, :, plan.positions] = new_values
        keys, values = self.keys[:batch, :, : plan.view], self.values[:batch, :, : plan.view]
        if plan.leaders is None:
            return keys, values
        return keys.index_select(0, plan.leaders), values.index_select(0, plan.leaders)

    def _store_prompts(self, store: Tensor, states: Tensor, which: int) -> Tensor:
        """Write all prompts' states into their slots; what the prefill attends to."""
        before = self._plan.before[which][self._number] if self._plan.before[which] else None
        start = 0 if before is None else before.shape[1]
        for slot, nodes in self._plan.prompts:
            if before is not None:
                store[slot, :, :start] = before
            store[slot, :, start : start + len(nodes)] = states[0, :, nodes]
        return states if before is None else torch.cat([before[None], states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Mask size of a prefill, which starts at position 0; a decode step brings its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Cached positions before a prefill: none."""
        return 0

    def get_max_length(self) -> int:
        """No own bound."""
        return -1


def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of a dtype and device. On Linux CPUs only positions that are written take memory: pages come untouched."""
    if like.device.type != "cpu" or sys.platform != "linux":
        return like.new_zeros(shape)
    count = math.prod(shape)
    pages = mmap.mmap(-1, count * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype, count=count).view(shape)


class SlotCache(Cache):
    """All layers' slots.

    Args:
        layers: Number of attention layers.
        max_slots: Most slots.
        context: Most positions of a slot.
    """

    def __init__(self, layers: int, max_slots: int, context: int) -> None:
        """Allocate nothing yet."""
        self._plan = Plan()
        self._max_slots, self._context = max_slots, context
        self._slot_layers = [SlotLayer(self._plan, number) for number in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    @property
    def updates(self) -> list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """``update`` of each layer."""
        return [layer.update for layer in self._slot_layers]

    def _reserve(self, slots: int, length: int) -> None:
        """Raise the planned capacity: slots by half, so copies stay rare, positions to the next step."""
        plan = self._plan
        if slots > plan.slots:
            grown = max(slots, plan.slots * 3 // 2)
            plan.slots = min(self._max_slots, -(-grown // SLOT_STEP) * SLOT_STEP)
        if length > plan.length:
            grown = max(length, plan.length * 5 // 4)
            plan.length = min(self._context, -(-grown // LENGTH_STEP) * LENGTH_STEP)

    def begin_prefill(
        self,
        prompts: list[tuple[int, Tensor]],
        slots: int,
        before: tuple[list[Tensor], list[Tensor]] = ([], []),
    ) -> None:
        """Plan a prefill.

        Args:
            prompts: Slot of each, and where its tokens lie in the input, int64 [length].
            slots: Number of slots that will be in use after it.
            before: Keys and values of each layer that all prompts begin with and that are not in the input,
                ``[kv_heads, before, head_dim]``.
        """
        start = before[0][0].shape[1] if before[0] else 0
        self._reserve(slots, start + max(len(nodes) for _, nodes in prompts))
        self._plan.prompts, self._plan.before = prompts, before

    def beginning(self, slot: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of the first ``length`` positions of a slot, keys and values of each layer."""
        stores = [(layer.keys, layer.values) for layer in self._slot_layers]
        return (
            [keys[slot, :, :length].clone() for keys, _ in stores if keys is not None],
            [values[slot, :, :length].clone() for _, values in stores if values is not None],
        )

    def begin_decode(
        self, positions: Tensor, longest: int, twins: Tensor | None = None, leaders: Tensor | None = None
    ) -> int:
        """Plan one token for each of the slots 0..batch-1.

        Args:
            positions: Position of each slot's new token, int64 [batch].
            longest: Largest position plus one.
            twins: Row of the input for each slot where several have the same tokens, int64 [batch].
            leaders: One slot of each row, int64 [rows].

        Returns:
            Number of positions that the step attends to; the mask must be that long.
        """
        plan = self._plan
        self._reserve(len(positions), longest)
        plan.prompts, plan.before = [], ([], [])
        plan.positions, plan.twins, plan.leaders = positions, twins, leaders
        plan.rows = torch.arange(len(positions), device=positions.device)
        plan.view = min(plan.length, -(-longest // VIEW_STEP) * VIEW_STEP)
        return plan.view

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first ``length`` positions of one slot to others."""
        for layer in self._slot_layers:
            for store in (layer.keys, layer.values):
                assert store is not None
                for target in targets:
                    store[target, :, :length] = store[source, :, :length]

    def clear(self) -> None:
        """Give all memory back; for when no request runs."""
        self._plan.slots = self._plan.length = 0
        self._plan.before = ([], [])
        for layer in self._slot_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        stores = [store for layer in self._slot_layers for store in (layer.keys, layer.values) if store is not None]
        return sum(store.numel() * store.element_size() for store in stores)
