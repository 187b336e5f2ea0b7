"""Forward passes over the slots: prefill some prompts, decode one token for all.

Guarantees: logits equal the model's own forward (to 1e-4 in float32), whatever runs beside; identical prompts of a
group are computed once; a prefill pads nothing. Knows requests only as ids and lengths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.inference.engine.model import LoadedModel
from agentrl.inference.engine.packed import PackedLinears
from agentrl.inference.engine.slots import SlotCache

SCORED_ROWS = 512  # prompt positions whose log-softmax is computed at a time, to bound memory


class ModelRunner:
    """A model, its packed linears and its cache.

    Args:
        loaded: The model.
        max_running: Number of slots.
    """

    def __init__(self, loaded: LoadedModel, max_running: int) -> None:
        """Pack the linears; allocate no cache yet."""
        self.loaded = loaded
        self.packed = PackedLinears(loaded.model)
        self.cache = SlotCache(loaded.layers, max_running, loaded.context_length)
        self.prefills = 0  # prompts computed so far, for tests and /server_info
        self.decodes = 0

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts once, in one forward pass, and fill the slots of all their samples.

        Prompts lie one after the other in a single row: nothing is padded, and a mask keeps them apart.

        Args:
            prompts: Ids of each.
            slots: Slots of each prompt's samples; together the last ones in use, without a hole.

        Returns:
            Logits after the last token of each prompt, float32 [prompts, vocab].
        """
        lengths = [len(prompt) for prompt in prompts]
        self._begin_prefill(lengths, slots)
        device = self.loaded.device
        ends = torch.tensor(lengths, device=device).cumsum(0)
        output = self.loaded.model(
            input_ids=torch.tensor([[token for prompt in prompts for token in prompt]], device=device),
            position_ids=torch.cat([torch.arange(length, device=device) for length in lengths])[None],
            attention_mask=block_mask(lengths, device) if len(prompts) > 1 else None,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=ends - 1,
        )
        for prompt, targets in zip(prompts, slots, strict=True):
            self.cache.copy(targets[0], list(targets[1:]), len(prompt))
        return output.logits[0].float()

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
        self._begin_prefill([len(tokens)], [slots])
        ids = torch.tensor([tokens], device=self.loaded.device)
        kept = len(tokens) - max(score_from, 1) + 1
        positions = torch.arange(len(tokens), device=ids.device)[None]
        output = self.loaded.model(
            input_ids=ids, position_ids=positions, cache=self.cache, use_cache=True, logits_to_keep=kept
        )
        self.cache.copy(slots[0], list(slots[1:]), len(tokens))
        logits = output.logits[0]
        scores: list[float] = []
        for start in range(0, kept - 1, SCORED_ROWS):
            rows = logits[start : min(start + SCORED_ROWS, kept - 1)].float().log_softmax(-1)
            begin = len(tokens) - kept + 1 + start
            scores += rows.gather(-1, ids[0, begin : begin + len(rows), None]).squeeze(-1).tolist()
        return logits[-1:].float(), scores

    def _begin_prefill(self, lengths: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        self.prefills += len(lengths)
        self.cache.begin_prefill(
            [(targets[0], length) for targets, length in zip(slots, lengths, strict=True)], slots[-1][-1] + 1
        )

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step for the slots 0..batch-1.

        Args:
            tokens: Last token of each row.
            positions: Its position, which is the number of cached tokens before it.

        Returns:
            Logits, float32 [batch, vocab].
        """
        self.decodes += 1
        device = self.loaded.device
        where = torch.tensor(positions, device=device)
        view = self.cache.begin_decode(torch.arange(len(tokens), device=device), where, max(positions) + 1)
        dtype = self.loaded.model.dtype
        hidden = torch.arange(view, device=device)[None] > where[:, None]
        mask = torch.zeros(len(tokens), 1, 1, view, dtype=dtype, device=device)
        mask.masked_fill_(hidden[:, None, None], torch.finfo(dtype).min)
        output = self.loaded.model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=where[:, None],
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    @torch.inference_mode()
    def weights_changed(self) -> None:
        """Repack after the parameters were written."""
        self.packed.repack()

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Move a request's cache to another slot."""
        if source != target:
            self.cache.copy(source, [target], length)


def block_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Causal attention within each of the prompts that lie one after the other, bool [1, 1, total, total]."""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    return ((owner[:, None] == owner[None]).tril())[None, None]
