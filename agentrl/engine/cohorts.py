"""Runs a model with transformers' own caches: one for each prompt, whose samples are decoded together.

Guarantees: logits equal those of the model's own forward, because its own cache classes, masks and positions are used;
nothing is shared between prompts. Samples of one prompt are as long as each other at every step, so that they are rows
of one cache (a cohort); rows of ended samples are dropped. A model without a cache that agrees with its forward pass
computes each sequence from its beginning at every step, in right-padded rows.

It has the methods of :class:`~agentrl.engine.runner.ModelRunner`, and is slower: prompts are computed one by one, and a
decode step has one forward pass for each prompt.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.core.image_reader import PromptImage
from agentrl.core.images import image_bytes
from agentrl.engine.expert_record import ExpertRecord
from agentrl.engine.kept_prefixes import KeptPrefixes
from agentrl.engine.model import LoadedModel
from agentrl.engine.model_calls import ModelCalls


@dataclass
class Cohort:
    """Samples of one prompt that are decoded together.

    Attributes:
        slots: Slot of each row.
        cache: Their cache; ``None`` for a model without one.
        ids: Ids of each row, for a model without a cache.
        experts: int16 ``[rows, positions, width]`` experts of each row's tokens; ``None`` without a record of them.
    """

    slots: list[int]
    cache: Any
    ids: list[list[int]]
    experts: Tensor | None = None

    def select(self, rows: Sequence[int]) -> None:
        """Keeps some rows, in the given order; a row may be repeated."""
        if self.cache is not None and list(rows) != list(range(len(self.slots))):
            self.cache.reorder_cache(torch.tensor(rows))
        self.ids = [list(self.ids[row]) for row in rows] if self.ids else []
        self.experts = self.experts[list(rows)] if self.experts is not None else None
        self.slots = [self.slots[row] for row in rows]


class CohortRunner:
    """Runs a model with transformers' caches, or without any.

    Args:
        loaded: The model.
        cached: Whether the model has a cache that agrees with its forward pass.
        experts: Where given, record of the experts that the model chooses.
    """

    def __init__(self, loaded: LoadedModel, *, cached: bool, experts: ExpertRecord | None = None) -> None:
        self.loaded = loaded
        self.names_experts = experts is not None
        self._experts = experts
        self.fast = self.native = self.packed = None
        self.kept = KeptPrefixes(None, 0)  # type: ignore[arg-type] - holds nothing
        self.prefills = self.prefilled_tokens = self.decodes = self.decoded_rows = 0
        self._calls = ModelCalls(loaded.model)
        self.past = "caches" if cached else "recomputed"
        self._cached = cached
        self._cohorts: list[Cohort] = []

    @property
    def cache(self) -> "CohortRunner":
        """This runner, which knows the bytes of its caches."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        caches = (cohort.cache for cohort in self._cohorts if cohort.cache is not None)
        return sum(tensor.numel() * tensor.element_size() for cache in caches for tensor in _tensors(cache))

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[Sequence[int]],
        images: Sequence[Sequence[PromptImage]] | None = None,
    ) -> Tensor:
        """Runs prompts one by one; see :meth:`ModelRunner.prefill`.

        Args:
            prompts: Ids of each.
            slots: Slots of each prompt's samples.
            images: Images of each prompt; ``None`` if none has any.
        """
        each = zip(prompts, slots, images or [()] * len(prompts), strict=True)
        return torch.stack([self._prefill(prompt, targets, 1, of_one)[-1] for prompt, targets, of_one in each]).float()

    def prefill_part(self, prompt: Sequence[int], slot: int, tokens: int) -> None:
        """Never needed: long prompts are computed in parts only where parts are kept."""
        raise NotImplementedError("prompts are computed whole")

    @torch.inference_mode()
    def prefill_scored(
        self, tokens: Sequence[int], slots: Sequence[int], score_from: int, images: Sequence[PromptImage] = ()
    ) -> tuple[Tensor, list[float]]:
        """Runs one prompt and scores it; see :meth:`ModelRunner.prefill_scored`."""
        first = max(score_from, 1)
        logits = self._prefill(tokens, slots, min(len(tokens), len(tokens) - first + 1), images)
        after = torch.tensor(list(tokens[first:]), dtype=torch.long, device=logits.device)
        rows = logits[: len(after)].float().log_softmax(-1)
        return logits[-1:].float(), rows.gather(-1, after[:, None]).squeeze(-1).tolist()

    def _prefill(self, prompt: Sequence[int], slots: Sequence[int], keep: int, images: Sequence[PromptImage]) -> Tensor:
        """Computes a prompt and makes its cohort; returns the logits of its last ``keep`` tokens."""
        self.prefills += 1
        self.prefilled_tokens += len(prompt)
        self._forget(set(slots))
        if self._cached:
            tokens = self._tensor([prompt])
            logits, cache = self._calls.with_cache(tokens, None, keep, self._arguments(tokens, images))
            cohort, logits = Cohort([slots[0]], cache, []), logits[0]
        else:
            logits = self._calls.without_cache([prompt], [keep])
            cohort = Cohort([slots[0]], None, [list(prompt)])
        cohort.experts = self._chosen(1) if self.names_experts else None
        cohort.select([0] * len(slots))
        cohort.slots = list(slots)
        self._cohorts.append(cohort)
        return logits

    def _arguments(self, tokens: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Makes the model's arguments for a prompt with images."""
        if not images:
            return {}
        pixels = self.loaded.pixels
        if pixels is None:
            raise ValueError("the model takes no images")
        pictured = torch.zeros_like(tokens, dtype=torch.bool)
        for image in images:
            pictured[0, image.start : image.end] = True
        return pixels.arguments(tokens, pictured, [image_bytes(image.url) for image in images])

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], twins: Sequence[Hashable] | None = None
    ) -> Tensor:
        """Decodes one token for each of the slots 0..batch-1; see :meth:`ModelRunner.decode`."""
        self.decodes += 1
        self.decoded_rows += len(tokens)
        self._forget({slot for cohort in self._cohorts for slot in cohort.slots if slot >= len(tokens)})
        found: list[Tensor] = [torch.empty(0)] * len(tokens)
        for cohort in self._cohorts:
            fed = [tokens[slot] for slot in cohort.slots]
            if cohort.cache is not None:
                logits, cohort.cache = self._calls.with_cache(self._tensor([[one] for one in fed]), cohort.cache, 1)
                rows = logits[:, -1]
                if cohort.experts is not None:
                    cohort.experts = torch.cat([cohort.experts, self._chosen(len(fed))], dim=1)
            else:
                cohort.ids = [[*ids, token] for ids, token in zip(cohort.ids, fed, strict=True)]
                rows = self._calls.without_cache(cohort.ids, [1] * len(fed))
                if cohort.experts is not None:  # earlier tokens keep those of their own weights
                    cohort.experts = torch.cat([cohort.experts, self._chosen(len(fed))[:, -1:]], dim=1)
            for slot, row in zip(cohort.slots, rows, strict=True):
                found[slot] = row
        return torch.stack(found).float()

    def _chosen(self, rows: int) -> Tensor:
        """Returns int16 ``[rows, tokens, width]`` experts of the latest forward pass."""
        assert self._experts is not None
        return self._experts.take().view(rows, -1, self._experts.width)

    def experts(self, slot: int, start: int, end: int) -> Tensor:
        """Experts of a slot's tokens; see :meth:`ModelRunner.experts`."""
        cohort = next(one for one in self._cohorts if slot in one.slots)
        assert cohort.experts is not None
        return cohort.experts[cohort.slots.index(slot), start:end]

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], device=self.loaded.device)

    def _forget(self, slots: set[int]) -> None:
        """Drops the rows of some slots."""
        for cohort in self._cohorts:
            kept = [row for row, slot in enumerate(cohort.slots) if slot not in slots]
            if kept and len(kept) < len(cohort.slots):
                cohort.select(kept)
            elif not kept:
                cohort.slots = []
        self._cohorts = [cohort for cohort in self._cohorts if cohort.slots]

    def adopt(self, parameter: Tensor, values: Tensor) -> bool:
        """Returns False: there are no packed copies."""
        return False

    def weights_changed(self) -> None:
        """Does nothing: no copies of the weights are held."""

    def clear(self) -> None:
        """Gives the memory of all caches back; for when no request runs."""
        self._cohorts = []

    def keep(self, tokens: Sequence[int], slot: int) -> None:
        """Keeps nothing."""

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Moves a request's row to another slot."""
        if source == target:
            return
        self._forget({target})
        for cohort in self._cohorts:
            cohort.slots = [target if slot == source else slot for slot in cohort.slots]


def _tensors(cache: Any) -> list[Tensor]:
    """Returns the tensors that a cache holds, in its layers and their states."""
    found: list[Tensor] = []
    for layer in getattr(cache, "layers", ()):
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else [value]
            found += [part for part in parts if isinstance(part, Tensor)]
    return found
