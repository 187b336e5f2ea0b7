"""Forward passes over the slots: prefill one prompt, decode one token for all.

Guarantees: logits equal the model's own forward (to 1e-4 in float32); identical prompts of a group cost one forward;
a prefill has batch 1 and no padding, so a prompt's logits do not depend on its neighbours. Knows requests only as ids
and lengths.
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
        self.prefills = 0  # forwards so far, for tests and /server_info
        self.decodes = 0

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], slots: Sequence[int], score_from: int = -1) -> tuple[Tensor, list[float]]:
        """Run a prompt once and fill the slots of all its samples.

        Args:
            tokens: Prompt ids.
            slots: Slots to fill, consecutive and the last ones in use.
            score_from: First position whose logprob is wanted; -1 for none.

        Returns:
            Logits after the last token, float32 [1, vocab], and the logprobs at temperature 1 of the tokens at
            positions max(score_from, 1) and later (empty if none are wanted).
        """
        self.prefills += 1
        self.cache.begin_prefill(slots[0], slots[-1] + 1, len(tokens))
        ids = torch.tensor([tokens], device=self.loaded.device)
        kept = len(tokens) - max(score_from, 1) + 1 if score_from >= 0 else 1
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
