"""Forward passes over the slots: prefill some prompts, decode one token for all.

Guarantees: logits equal those of the model's own forward (to 1e-4 in float32), whatever runs beside; these are computed
once: identical prompts of a group, common beginnings of prompts in one prefill, the next token of slots with the same
tokens, and beginnings in the prefix cache. A prefill has no padding. The runner knows only ids and lengths of requests.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from agentrl.engine import KEPT_TOKENS
from agentrl.engine.attention import PrefillAttention
from agentrl.engine.expert_record import ExpertRecord
from agentrl.engine.fast_path import fast_path
from agentrl.engine.forward_batch import Prefill, plan_decode, plan_prefill
from agentrl.engine.kept_prefixes import KeptPrefixes
from agentrl.engine.model import LoadedModel
from agentrl.engine.operators import NativeOperators
from agentrl.engine.own_forward import OwnForward
from agentrl.engine.packed_weights import PackedLinears
from agentrl.engine.slots import SlotCache, layer_shapes

SCORED_ROWS = 512  # prompt positions whose log-softmax is computed at a time, to bound memory
TWINS_PAY = 0.8  # share of distinct slots below which a step computes them once: their caches must be gathered


class ModelRunner:
    """Runs a model with packed linear layers and its cache.

    Args:
        loaded: The model.
        max_running: Number of slots.
        kept_tokens: Most tokens whose keys and values are kept for later prompts.
        compiled: Whether a compiler is used where there is one.
        experts: Where given, record of the experts that the model chooses, which slots then keep too.
    """

    past = "slots"  # how the past of a request is kept

    def __init__(
        self, loaded: LoadedModel, max_running: int, kept_tokens: int = KEPT_TOKENS, *, compiled: bool = True,
        experts: ExpertRecord | None = None,
    ) -> None:  # fmt: skip
        """Pack the linears; allocate no cache yet."""
        self.loaded = loaded
        self.fast = fast_path(loaded.model, compiled=compiled) if experts is None else None
        operators = self.fast.operators if self.fast is not None else None
        self.native = operators.native if isinstance(operators, NativeOperators) else None
        self.packed = PackedLinears(loaded.model) if self.fast is None else None
        shapes = layer_shapes(loaded.model, loaded.layers)
        shapes += [experts.shape(loaded.device)] if experts is not None else []
        self.cache = SlotCache(shapes, max_running, loaded.context_length)
        self.kept = KeptPrefixes(self.cache, kept_tokens)
        self._own = OwnForward(loaded.model, self.cache, loaded.layers, experts)
        self.names_experts = experts is not None
        self.prefills = 0  # prompts computed so far, for tests and /server_info
        self.prefilled_tokens = 0  # tokens of all prefills that were computed
        self.decodes = 0
        self.decoded_rows = 0  # rows of all decode steps: fewer than slots where slots had the same tokens

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts once, in one forward pass, and fill the slots of all their samples.

        Args:
            prompts: Ids of each.
            slots: Slots of each prompt's samples.

        Returns:
            Logits after the last token of each prompt, float32 ``[prompts, vocab]``.
        """
        self.prefills += len(prompts)
        self.cache.reserve(max(map(max, slots)) + 1, max(map(len, prompts)))
        heads = [targets[0] for targets in slots]
        cached = [self.kept.restore(prompt, slot) for prompt, slot in zip(prompts, heads, strict=True)]
        logits = self._compute(prompts, heads, cached)
        for prompt, targets in zip(prompts, slots, strict=True):
            self.cache.copy(targets[0], targets[1:], len(prompt))
            self.kept.keep(prompt, targets[0])
        return logits.float()

    @torch.inference_mode()
    def prefill_part(self, prompt: Sequence[int], slot: int, tokens: int) -> None:
        """Compute the next tokens of a long prompt and keep them, so that the rest of it can follow later.

        Args:
            prompt: Ids; more than ``tokens`` of them are not kept yet.
            slot: A free slot.
            tokens: Number of tokens to compute.
        """
        end = self.kept.shared(prompt) + tokens
        self.cache.reserve(slot + 1, end)
        self._compute([prompt[:end]], [slot], [self.kept.restore(prompt, slot)])
        self.kept.keep(prompt[:end], slot)

    @torch.inference_mode()
    def prefill_scored(
        self, tokens: Sequence[int], slots: Sequence[int], score_from: int
    ) -> tuple[Tensor, list[float]]:
        """Run one prompt and score it.

        Args:
            tokens: Prompt ids.
            slots: Slots to fill, as in :meth:`prefill`.
            score_from: First position whose logprob is wanted.

        Returns:
            Logits after the last token, float32 ``[1, vocab]``, and the logprobs at temperature 1 of the tokens at
            positions ``max(score_from, 1)`` and later.
        """
        self.prefills += 1
        self.cache.reserve(max(slots) + 1, len(tokens))
        first = max(score_from, 1)  # its logprob needs the logits before it
        start = self.kept.restore(tokens[:first], slots[0])
        scores: list[float] = []
        logits = torch.empty(0)
        while start < len(tokens):
            end = min(len(tokens), max(start + SCORED_ROWS, first))
            batch = plan_prefill([tokens[:end]], [slots[0]], [start], self.loaded.device)
            keep = torch.arange(max(start, first - 1), end, device=self.loaded.device)
            logits = self._logits(batch, start, keep - start)
            after = torch.tensor(tokens[int(keep[0]) + 1 : end + 1], device=self.loaded.device)
            rows = logits[: len(after)].float().log_softmax(-1)
            scores += rows.gather(-1, after[:, None]).squeeze(-1).tolist()
            self.prefilled_tokens += end - start
            start = end
        self.cache.copy(slots[0], slots[1:], len(tokens))
        self.kept.keep(tokens, slots[0])
        return logits[-1:].float(), scores

    def _compute(self, prompts: Sequence[Sequence[int]], slots: Sequence[int], cached: Sequence[int]) -> Tensor:
        """Logits after the last token of each prompt."""
        parts: dict[tuple[int, ...], list[int]] = {}
        for index, prompt in enumerate(prompts):  # a model's own forward takes prompts that begin alike in their slots
            beginning = () if self.fast is not None else tuple(prompt[: cached[index]])
            parts.setdefault(beginning, []).append(index)
        rows: list[Tensor] = [torch.empty(0)] * len(prompts)
        for beginning, indices in parts.items():
            batch = plan_prefill(
                [prompts[i] for i in indices],
                [slots[i] for i in indices],
                [cached[i] for i in indices],
                self.loaded.device,
            )
            self.prefilled_tokens += len(batch.tokens)
            for index, row in zip(indices, self._logits(batch, len(beginning), batch.last), strict=True):
                rows[index] = row
        return torch.stack(rows)

    def _logits(self, batch: Prefill, start: int, keep: Tensor) -> Tensor:
        if self.fast is None:
            return self._own.prefill(batch, start, keep)
        return self.fast(batch.tokens, batch.positions, PrefillAttention(self.cache, batch), keep)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], twins: Sequence[Hashable] | None = None
    ) -> Tensor:
        """Decodes one token for each of the slots 0..batch-1.

        Args:
            tokens: Last token of each slot.
            positions: Position of that token, which is the number of cached tokens before it.
            twins: Equal for slots whose cached tokens, and the last one, are the same: they are computed once.

        Returns:
            Logits, float32 ``[batch, vocab]``.
        """
        self.decodes += 1
        self.cache.reserve(len(tokens), max(positions) + 1)
        distinct = _distinct(twins or range(len(tokens)))
        shared = distinct if len(distinct[0]) <= TWINS_PAY * len(tokens) else None
        device, dtype = self.loaded.device, self.loaded.model.dtype
        batch = plan_decode(tokens, positions, shared, self.cache.length, dtype, device)
        self.decoded_rows += len(batch.tokens)
        if self.fast is not None:
            attend = self.fast.operators.decode_attention(self.cache, batch)
            logits = self.fast(batch.tokens, batch.positions, attend)
        else:
            logits = self._own.decode(batch)
        return logits.float() if batch.write_tokens is None else logits[batch.write_tokens].float()

    def adopt(self, parameter: Tensor, values: Tensor) -> bool:
        """Copy new values into a parameter and its packed copy at once; False where that is not possible."""
        return self.fast is not None and self.fast.adopt(parameter, values)

    @torch.inference_mode()
    def weights_changed(self) -> None:
        """Repack after the parameters were written, and forget what the old ones computed."""
        for weights in (self.fast, self.packed):
            if weights is not None:
                weights.repack()
        self.kept.forget()

    def clear(self) -> None:
        """Give the cache's memory back; for when no request runs."""
        self.cache.clear()
        self.kept.forget()

    @torch.inference_mode()
    def keep(self, tokens: Sequence[int], slot: int) -> None:
        """Keep what a slot holds of a sequence for later prompts that begin with it."""
        self.kept.keep(tokens, slot)

    def experts(self, slot: int, start: int, end: int) -> Tensor:
        """Experts of a slot's tokens from ``start`` to ``end``, int16 ``[tokens, width]``; with a record of them."""
        return self.cache.keys(self.loaded.layers)[slot, 0, start:end]

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Move a request's cache to another slot."""
        if source != target:
            self.cache.copy(source, [target], length)


def _distinct(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Index of the first of each set of equal keys, and for each key the number of its set."""
    number: dict[Hashable, int] = {}
    first: list[int] = []
    inverse: list[int] = []
    for index, key in enumerate(keys):
        if key not in number:
            number[key] = len(first)
            first.append(index)
        inverse.append(number[key])
    return first, inverse
