"""Runs a batch through a model's own forward, with a cache class that transformers models accept.

Guarantees: works for any decoder that takes ``cache`` and a 4-D mask; no key is copied for a plain decode step. Rows
that are much longer than the others, and prompts that begin differently in their slots, get a pass of their own.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from agentrl.engine.expert_record import ExpertRecord
from agentrl.engine.forward_batch import Decode, Prefill
from agentrl.engine.slots import SlotCache


class _Layer(CacheLayerMixin):
    """Cache of one layer: stores new keys and values, and returns those that the queries attend to."""

    is_sliding = False

    def __init__(self, owner: "OwnForward", number: int) -> None:
        super().__init__()
        self._owner, self._number = owner, number
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slots are allocated already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new states and return what the queries attend to.

        Args:
            key_states: ``[1, kv_heads, tokens, dim]`` in a prefill, ``[rows, kv_heads, 1, dim]`` in a decode step.
            value_states: The same shape, dim may differ.
            args: Ignored.
            kwargs: Ignored.

        Returns:
            Keys and values, ``[rows, kv_heads, attended, dim]``.
        """
        batch = self._owner.batch
        if isinstance(batch, Prefill):
            return self._prefill(batch, key_states, value_states)
        assert batch is not None
        return self._decode(batch, key_states[:, :, 0], value_states[:, :, 0])

    def _prefill(self, batch: Prefill, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cache, nodes, start = self._owner.cache, batch.write_tokens, self._owner.start
        cache.write(
            self._number, batch.write_slots, batch.write_positions,
            keys[0].transpose(0, 1)[nodes], values[0].transpose(0, 1)[nodes],
        )  # fmt: skip
        if not start:
            return keys, values
        slot = batch.runs[0].slot
        before = cache.keys(self._number)[slot, None, :, :start], cache.values(self._number)[slot, None, :, :start]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def _decode(self, batch: Decode, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        cache, lines = self._owner.cache, batch.write_tokens
        if lines is not None:
            new_keys, new_values = new_keys[lines], new_values[lines]
        cache.write(self._number, batch.write_slots, batch.write_positions, new_keys, new_values)
        keys = cache.keys(self._number)[:, :, : batch.view]
        values = cache.values(self._number)[:, :, : batch.view]
        if batch.rows is None:
            return keys[: len(new_keys)], values[: len(new_keys)]
        return keys.index_select(0, batch.rows), values.index_select(0, batch.rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Mask size of a prefill that starts at position 0; others bring their own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Cached positions before a prefill that brings no mask: none."""
        return 0

    def get_max_length(self) -> int:
        """No own bound."""
        return -1


class OwnForward:
    """A model's forward over the slots.

    Args:
        model: A transformers causal language model.
        cache: Slots.
        layers: Attention layers.
        experts: Where given, record of the experts that its routers choose; the cache keeps them as one layer more.
    """

    def __init__(self, model: Any, cache: SlotCache, layers: int, experts: ExpertRecord | None = None) -> None:
        """Nothing runs yet."""
        self.cache = cache
        self._number, self._experts = layers, experts
        self.batch: Prefill | Decode | None = None
        self.start = 0  # positions before a prefill that are in the slots
        self._model = model
        self._layers = Cache(layers=[_Layer(self, number) for number in range(layers)])

    def prefill(self, batch: Prefill, start: int, keep: Tensor) -> Tensor:
        """Logits after the tokens ``keep`` of a batch of prompts.

        Args:
            batch: Prompts that all begin with the same ``start`` tokens, which are in their slots.
            start: Tokens before the batch.
            keep: int64 ``[kept]``.

        Returns:
            ``[kept, vocab]``.
        """
        self.batch, self.start = batch, start
        mask = None if len(batch.runs) == 1 and not start else _tree_mask(batch, start)
        return self._run(batch.tokens[None], batch.positions[None], mask, keep)[0]

    def decode(self, batch: Decode) -> Tensor:
        """Logits of each row, ``[rows, vocab]``."""
        if not batch.alone:
            return self._rows(batch)
        logits: list[Tensor] = [torch.empty(0)] * len(batch.tokens)
        alone = set(batch.alone)
        for chosen in ([row for row in range(len(batch.tokens)) if row not in alone], batch.alone):
            if chosen:
                for row, line in zip(chosen, self._rows(_only(batch, chosen)), strict=True):
                    logits[row] = line
        return torch.stack(logits)

    def _rows(self, batch: Decode) -> Tensor:
        self.batch = batch
        keep: Tensor | int = 1
        return self._run(batch.tokens[:, None], batch.positions[:, None], batch.mask[:, None, None], keep)[:, -1]

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int) -> Tensor:
        logits = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=self._layers,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        if self._experts is not None and self.batch is not None:
            batch, rows = self.batch, self._experts.take()[:, None]
            rows = rows if batch.write_tokens is None else rows[batch.write_tokens]
            self.cache.write(self._number, batch.write_slots, batch.write_positions, rows, rows[..., :0])
        return logits


def _tree_mask(batch: Prefill, start: int) -> Tensor:
    """True where a token may see another: ``[1, 1, tokens, start + tokens]``; all see what comes before all."""
    count = len(batch.tokens)
    seen = torch.zeros(count, start + count, dtype=torch.bool, device=batch.tokens.device)
    seen[:, :start] = True
    paths: dict[int, list[int]] = {}
    for slot, token in zip(batch.write_slots.tolist(), batch.write_tokens.tolist(), strict=True):
        paths.setdefault(slot, []).append(token)
    for run in batch.runs:
        path = torch.tensor(paths[run.slot], device=seen.device) + start
        own = torch.ones(run.count, len(path), dtype=torch.bool, device=seen.device).tril_(len(path) - run.count)
        seen[run.first : run.first + run.count, path] = own
    return seen[None, None]


def _only(batch: Decode, rows: list[int]) -> Decode:
    """Some rows of a decode step; each slot is written with the row that computes it."""
    device = batch.tokens.device
    index = torch.tensor(rows, device=device)
    slots = batch.rows if batch.rows is not None else batch.write_slots
    lines = batch.write_tokens if batch.write_tokens is not None else batch.write_slots
    place = torch.full((len(batch.tokens),), -1, device=device)
    place[index] = torch.arange(len(rows), device=device)
    written = place[lines] >= 0
    view = max(batch.lengths[row] for row in rows)
    positions = batch.positions[index]
    hidden = torch.arange(view, device=device)[None] > positions[:, None]
    return replace(
        batch,
        tokens=batch.tokens[index],
        positions=positions,
        rows=slots[index],
        lengths=[batch.lengths[row] for row in rows],
        view=view,
        mask=torch.zeros_like(hidden, dtype=batch.mask.dtype).masked_fill_(hidden, torch.finfo(batch.mask.dtype).min),
        alone=[],
        write_slots=batch.write_slots[written],
        write_positions=batch.write_positions[written],
        write_tokens=place[lines][written],
    )
