"""Forward passes over the slots: prefill some prompts, decode one token for all.

Guarantees: logits equal the model's own forward (to 1e-4 in float32), whatever runs beside; identical prompts of a
group are computed once, and so is what prompts of one prefill begin with in common and what slots with the same
tokens decode; what the latest prompts began with is not computed again; a prefill pads nothing. Knows requests only as
ids and lengths.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from agentrl.core.prefix_tree import PrefixTree
from agentrl.core.tree_mask import tree_mask
from agentrl.inference.engine.fast_path import fast_path
from agentrl.inference.engine.kept_prefix import KeptPrefix
from agentrl.inference.engine.model import LoadedModel
from agentrl.inference.engine.packed import PackedLinears
from agentrl.inference.engine.slots import SlotCache

SCORED_ROWS = 512  # prompt positions whose log-softmax is computed at a time, to bound memory
TWINS_PAY = 0.8  # share of distinct slots below which a step computes them once: their caches must be gathered


class ModelRunner:
    """A model, its packed linears and its cache.

    Args:
        loaded: The model.
        max_running: Number of slots.
    """

    def __init__(self, loaded: LoadedModel, max_running: int) -> None:
        """Pack the linears; allocate no cache yet."""
        self.loaded = loaded
        self.fast = fast_path(loaded.model)
        self.packed = PackedLinears(loaded.model) if self.fast is None else None
        self.cache = SlotCache(loaded.layers, max_running, loaded.context_length)
        self.kept = KeptPrefix()
        self.prefills = 0  # prompts computed so far, for tests and /server_info
        self.prefilled_tokens = 0  # tokens of all prefills that were computed
        self.decodes = 0
        self.decoded_rows = 0  # rows of all decode steps: fewer than slots where slots had the same tokens

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts once, in one forward pass, and fill the slots of all their samples.

        They form a prefix tree in a single row: nothing is padded, and a mask keeps them apart.

        Args:
            prompts: Ids of each.
            slots: Slots of each prompt's samples; together the last ones in use, without a hole.

        Returns:
            Logits after the last token of each prompt, float32 [prompts, vocab].
        """
        tree, paths = PrefixTree(), [torch.empty(0, dtype=torch.long)] * len(prompts)
        device = self.loaded.device
        start = min(self.kept.shared(prompt) for prompt in prompts)
        for index in sorted(range(len(prompts)), key=lambda i: list(prompts[i])):
            paths[index] = torch.tensor(tree.add(prompts[index][start:]), device=device)
        self._begin_prefill(paths, slots, start)
        mask = None
        if len(prompts) > 1 or start:
            mask = tree_mask(torch.tensor([tree.ends], device=device))
            mask = torch.nn.functional.pad(mask, (start, 0), value=True)  # all see what comes before all
        logits = self._prefill_row(
            torch.tensor(tree.token_ids, device=device),
            torch.tensor(tree.positions, device=device) + start,
            mask,
            torch.stack([path[-1] for path in paths]),
        )
        for path, targets in zip(paths, slots, strict=True):
            self.cache.copy(targets[0], list(targets[1:]), start + len(path))
        self.prefilled_tokens += len(tree)
        length = self.kept.worth(prompts)
        if length:
            self.kept.keep(prompts[0][:length], *self.cache.beginning(slots[0][0], length))
        return logits.float()

    def _prefill_row(self, tokens: Tensor, where: Tensor, mask: Tensor | None, keep: Tensor) -> Tensor:
        """Logits after some of the tokens of one row, ``[keep, vocab]``."""
        if self.fast is not None:
            return self.fast.prefill(tokens, where, mask, keep, self.cache.updates)
        output = self.loaded.model(
            input_ids=tokens[None],
            position_ids=where[None],
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits[0]

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
            Logits after the last token, float32 [1, vocab], and the logprobs at temperature 1 of the tokens at
            positions max(score_from, 1) and later.
        """
        ids = torch.tensor([tokens], device=self.loaded.device)
        kept = len(tokens) - max(score_from, 1) + 1
        positions = torch.arange(len(tokens), device=ids.device)
        self._begin_prefill([positions], [slots])
        output = self.loaded.model(
            input_ids=ids, position_ids=positions[None], cache=self.cache, use_cache=True, logits_to_keep=kept
        )
        self.cache.copy(slots[0], list(slots[1:]), len(tokens))
        logits = output.logits[0]
        scores: list[float] = []
        for start in range(0, kept - 1, SCORED_ROWS):
            rows = logits[start : min(start + SCORED_ROWS, kept - 1)].float().log_softmax(-1)
            begin = len(tokens) - kept + 1 + start
            scores += rows.gather(-1, ids[0, begin : begin + len(rows), None]).squeeze(-1).tolist()
        return logits[-1:].float(), scores

    def _begin_prefill(self, paths: Sequence[Tensor], slots: Sequence[Sequence[int]], start: int = 0) -> None:
        self.prefills += len(paths)
        prompts = [(targets[0], path) for targets, path in zip(slots, paths, strict=True)]
        kept = self.kept
        before = ([k[:, :start] for k in kept.keys], [v[:, :start] for v in kept.values]) if start else ([], [])
        self.cache.begin_prefill(prompts, slots[-1][-1] + 1, before)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], twins: Sequence[Hashable] | None = None
    ) -> Tensor:
        """One step for the slots 0..batch-1.

        Args:
            tokens: Last token of each slot.
            positions: Its position, which is the number of cached tokens before it.
            twins: Equal for slots whose cached tokens, and the last one, are the same: they are computed once.

        Returns:
            Logits, float32 [batch, vocab].
        """
        self.decodes += 1
        device = self.loaded.device
        where = torch.tensor(positions, device=device)
        leaders, inverse = _distinct(twins or range(len(tokens)))
        if len(leaders) > TWINS_PAY * len(tokens):
            self.decoded_rows += len(tokens)
            view = self.cache.begin_decode(where, max(positions) + 1)
            return self._decode_rows(torch.tensor(tokens, device=device), where, view)
        self.decoded_rows += len(leaders)
        rows = torch.tensor(leaders, device=device)
        lines = torch.tensor(inverse, device=device)
        view = self.cache.begin_decode(where, max(positions) + 1, lines, rows)
        return self._decode_rows(torch.tensor(tokens, device=device)[rows], where[rows], view)[lines]

    def _decode_rows(self, tokens: Tensor, where: Tensor, view: int) -> Tensor:
        """Logits of one token per row at positions ``where``."""
        dtype = self.loaded.model.dtype
        hidden = torch.arange(view, device=where.device)[None] > where[:, None]
        mask = torch.zeros(len(tokens), 1, 1, view, dtype=dtype, device=where.device)
        mask.masked_fill_(hidden[:, None, None], torch.finfo(dtype).min)
        if self.fast is not None and len(tokens) > 1:  # one row is a matrix-vector product: plain MKL is faster
            return self.fast.decode(tokens, where, mask, self.cache.updates).float()
        output = self.loaded.model(
            input_ids=tokens[:, None],
            position_ids=where[:, None],
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

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
