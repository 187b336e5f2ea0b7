"""Finds out how the embedded engine can keep a model's past, by trying it.

Guarantees: a way is chosen only if decoding with it gave the logits of the model's forward pass over the whole
sequence; windows are tried on a small random model of the same config in which they are a few tokens long.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.engine.model_calls import ModelCalls
from agentrl.models.probe import COARSE, FAULTS, hidden_window, wrong_rows, wrong_trees
from agentrl.models.small_model import short_windows
from agentrl.models.tree_support import ids_of, limited_attention
from agentrl.models.way import Way

Past = Literal["slots", "caches", "recomputed"]
PROMPT, DECODED = 9, 4  # tokens of the trial: longer than a short window
# Largest mean difference of a logit over its mean size. Rounding gives 1e-5 at most; some state-space classes bound
# their time steps in a forward pass and not in decoding, which gives 4e-4.
TOLERANCE = {torch.float32: 2e-4}


def find_past(model: Any, context: int) -> tuple[Past | None, str]:
    """Finds how a model's past can be kept.

    Args:
        model: A causal language model in evaluation mode.
        context: Most tokens of a sequence.

    Returns:
        The way, and why it is not a faster one; ``None`` and the reason if no way is exact.
    """
    config = model.config.get_text_config(decoder=True)
    limited = limited_attention(config, context)
    if limited:
        why = f"it has {', '.join(limited)} layers"
        window = getattr(config, "sliding_window", None)
        if limited == ["sliding_attention"] and window:
            why += f" (--context-length {window} or less needs no window)"
    else:
        why = wrong_trees(model, Way()) or hidden_window(model, context)
        if why is None:
            return "slots", ""
    small = short_windows(model, context) if limited else None
    wrong = next(filter(None, (wrong_cache(one) for one in (small, model) if one is not None)), None)
    if wrong is None:
        return "caches", why
    why = f"{why}; its cache {wrong}"
    if wrong := wrong_rows(model, "padded"):
        return None, wrong
    return "recomputed", why


@torch.inference_mode()
def wrong_cache(model: Any) -> str | None:
    """Returns what is wrong with decoding with transformers' own cache; ``None`` if the logits are right.

    A prompt is computed once and its cache given to two samples, which then go on with different tokens, until one is
    dropped.
    """
    ids, calls = ids_of(model, PROMPT + 2 * DECODED), ModelCalls(model)
    prompt, answers = ids[:PROMPT], [ids[PROMPT : PROMPT + DECODED], ids[PROMPT + DECODED :]]
    device = next(model.parameters()).device
    found: list[Tensor] = []
    try:
        logits, cache = calls.with_cache(torch.tensor([prompt], device=device), None, 1)
        found.append(logits[0])
        cache.reorder_cache(torch.tensor([0, 0]))
        for step in range(DECODED):
            if step == DECODED - 1:
                cache.reorder_cache(torch.tensor([1]))
                answers = answers[1:]
            fed = torch.tensor([[answer[step]] for answer in answers], device=device)
            logits, cache = calls.with_cache(fed, cache, 1)
            found.append(logits[-1])
    except FAULTS as error:
        return f"cannot be used ({type(error).__name__}: {error})"
    whole = torch.tensor([prompt + answers[-1]], device=device)
    expected = model(input_ids=whole, use_cache=False).logits[0, PROMPT - 1 :].float()
    gap = ((torch.cat(found).float() - expected).abs().mean() / expected.abs().mean()).item()
    if gap <= TOLERANCE.get(next(model.parameters()).dtype, COARSE):  # false for NaN
        return None
    return f"gives other logits than its forward pass (by {gap:.1%} on average)"
