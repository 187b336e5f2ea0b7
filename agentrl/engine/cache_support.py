"""Finds out how the embedded engine can keep a model's past, by trying it.

Guarantees: a way is chosen only if decoding with it gave the logits of the model's forward pass over the whole
sequence; windows are tried on a small random model of the same config in which they are a few tokens long.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.core.images import data_url, image_bytes
from agentrl.engine.model_calls import ModelCalls
from agentrl.models.pixels import embedded_as, pixels_of
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
    if pixels_of(model) is not None:
        wrong = wrong_cache(model) or wrong_image_cache(model)
        return (None if wrong else "caches"), f"its cache {wrong}" if wrong else "its prompts may hold images"
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
    expected = model(input_ids=whole, use_cache=False).logits[0, PROMPT - 1 :]
    return _gap(model, torch.cat(found), expected)


@torch.inference_mode()
def wrong_image_cache(model: Any) -> str | None:
    """Returns what is wrong with decoding behind a prompt with an image; ``None`` if the logits are right."""
    from PIL import Image

    pixels, calls, device = pixels_of(model), ModelCalls(model), next(model.parameters()).device
    assert pixels is not None
    url = data_url(Image.effect_mandelbrot((96, 64), (-2.0, -1.0, 1.0, 1.0), 20))
    count = pixels.reader.count(url)
    ids = [one for one in ids_of(model, PROMPT + DECODED + 2) if one != pixels.reader.token_id][: PROMPT + DECODED]
    half = PROMPT // 2
    prompt = [*ids[:half], *[pixels.reader.token_id] * count, *ids[half:PROMPT]]
    answer = ids[PROMPT:]
    try:
        tokens = torch.tensor([prompt], device=device)
        arguments = pixels.arguments(tokens, torch.ones_like(tokens, dtype=torch.bool), [image_bytes(url)])
        logits, cache = calls.with_cache(tokens, None, 1, arguments)
        found = [logits[0]]
        for token in answer:
            logits, cache = calls.with_cache(torch.tensor([[token]], device=device), cache, 1)
            found.append(logits[0])
        whole = torch.tensor([prompt + answer], device=device)
        pictured = torch.ones_like(whole, dtype=torch.bool)
        with embedded_as(model, whole, pixels.arguments(whole, pictured, [image_bytes(url)])) as inputs:
            expected = model(use_cache=False, **inputs).logits[0, len(prompt) - 1 :]
    except FAULTS as error:
        return f"cannot be used behind an image ({type(error).__name__}: {error})"
    return _gap(model, torch.cat(found), expected)


def _gap(model: Any, found: Tensor, expected: Tensor) -> str | None:
    gap = ((found.float() - expected.float()).abs().mean() / expected.float().abs().mean()).item()
    if gap <= TOLERANCE.get(next(model.parameters()).dtype, COARSE):  # false for NaN
        return None
    return f"gives other logits than its forward pass (by {gap:.1%} on average)"
