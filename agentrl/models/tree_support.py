"""Tests whether a model can compute several sequences as one prefix tree.

Guarantees: a model that :func:`not_for_trees` accepts computes each token of a tree as in its own sequence. Other
models would be silently wrong: state-space and linear attention carry their state from branch to branch, ALiBi takes
distances from places in the row, a sliding window would have to be in the mask.
"""

from typing import Any

import torch

from agentrl.models.decoder import decoder_of
from agentrl.models.prefix_tree import PrefixTree
from agentrl.models.tree_mask import tree_mask

LENGTH = 7  # tokens of each of the two test sequences
SHARED = 3  # common leading tokens of the test sequences
TOLERANCE = 0.1  # mean difference over mean size: rounding gives 1e-6, in bfloat16 0.01; a wrong model several tenths


def limited_attention(config: Any, context: int) -> list[str]:
    """Returns the kinds of layers that do not attend to the whole past within ``context`` tokens.

    Args:
        config: Text config of a transformers model.
        context: Length of the longest sequence in tokens.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None and window and getattr(config, "use_sliding_window", True):
        kinds.add("sliding_attention")
    if window and context <= window:
        kinds.discard("sliding_attention")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and context <= chunk:
        kinds.discard("chunked_attention")
    return sorted(kinds - {"full_attention"})


def ids_of(model: Any, count: int) -> list[int]:
    """Returns ids from a model's whole vocabulary: on special tokens some models have too large activations."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return ((torch.arange(count) * 2 + 1) * vocabulary // (2 * count)).tolist()


@torch.no_grad()
def not_for_trees(model: Any) -> str | None:
    """Returns why a causal language model cannot compute prefix trees, from a trial on a small tree; None if it can."""
    ids = ids_of(model, 2 * LENGTH - SHARED)
    first, second = ids[:LENGTH], ids[:SHARED] + ids[LENGTH:]
    tree = PrefixTree()
    paths = tree.add(first), tree.add(second)
    decoder, device = decoder_of(model), model.device

    def states(tokens: list[int], **how: Any) -> torch.Tensor:
        row = torch.tensor([tokens], device=device)
        return decoder(input_ids=row, use_cache=False, **how).last_hidden_state[0].float()

    alone = torch.cat([states(first), states(second)])
    try:
        together = states(
            tree.token_ids,
            position_ids=torch.tensor([tree.positions], device=device),
            attention_mask=tree_mask(torch.tensor([tree.ends], device=device)),
        )[torch.tensor([*paths[0], *paths[1]], device=device)]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"it does not accept an attention mask for trees ({type(error).__name__}: {error})"
    gap = ((together - alone).abs().mean() / alone.abs().mean()).item()
    if not gap <= TOLERANCE:  # also true for NaN
        return f"tokens of one sequence depend on another that shares a row with it (by {gap:.0%} on average)"
    return None
