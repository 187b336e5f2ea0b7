"""Finds out how a model can compute several sequences, by trying it.

Guarantees: a way is returned only if the model computed each token of a test batch as in its own sequence, to
:data:`TOLERANCE`; windows and chunks are tried on a small random model of the same config in which they are a few
tokens long, so that the test sequences are longer. No class of models is known by name. Models are left as they were.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from agentrl.models.decoder import decoder_of
from agentrl.models.pixels import pixels_of
from agentrl.models.prefix_tree import PrefixTree
from agentrl.models.small_model import short_windows, windows_of
from agentrl.models.tree_mask import Reach, added, tree_mask
from agentrl.models.tree_support import ids_of, limited_attention
from agentrl.models.way import Way

LENGTH, SHARED = 11, 5  # tokens of each of the two test sequences, common leading ones; short windows are shorter
# Largest mean difference over mean size. Rounding gives 1e-6, and 0.01 in bfloat16; a wrong model several tenths, but
# a wrong window or a state that crosses to the next sequence changes few tokens.
TOLERANCE = {torch.float32: 1e-3}
COARSE = 0.1  # for other dtypes
FAULTS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, AssertionError)
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class Unfit(ValueError):
    """A model cannot compute several sequences in any way; the message says why."""


def find_way(model: Any, context: int, *, packed: bool = False) -> Way:
    """Finds the fastest way in which a model computes several sequences exactly.

    Args:
        model: Hugging Face causal LM, as it was loaded.
        context: Largest number of tokens of a sequence.
        packed: Whether packed rows are preferred to padded ones where trees are not possible.

    Raises:
        Unfit: A token's hidden state depends on other tokens than those before it.
    """
    config = model.config.get_text_config(decoder=True)
    if pixels_of(model) is not None:
        if wrong := wrong_rows(model, "padded"):
            raise Unfit(wrong)
        return Way("padded", why="its sequences may hold images")
    limited = limited_attention(config, context)
    way, why = _limited_trees(model, config, limited, context) if limited else _plain_trees(model, context)
    if why is None:
        return way
    if packed:
        apart = wrong_rows(model, "packed")
        if apart is None:
            return Way("packed", why=why)
        why = f"{why}, nor in packed rows: {apart}"
    if wrong := wrong_rows(model, "padded"):
        raise Unfit(wrong)
    return Way("padded", why=why)


def _plain_trees(model: Any, context: int) -> tuple[Way, str | None]:
    """Tries trees with one mask of unlimited reach; returns the way, or why there is none."""
    whys = []
    for way in (Way(), Way(added=True)):
        why = wrong_trees(model, way) or hidden_window(model, context, way)
        if why is None:
            return way, None
        whys.append(why)
    return Way(), whys[0]


def hidden_window(model: Any, context: int, way: Way | None = None) -> str | None:
    """Returns which window that its config names a model applies to places in a row, instead of to positions.

    Such a window does not show in short sequences; so it is cut on a small model.

    Args:
        model: A model whose layer kinds name no limited attention.
        context: Largest number of tokens of a sequence.
        way: Masks that the model takes.
    """
    config = model.config.get_text_config(decoder=True)
    known = {"sliding_window"} if limited_attention(config, 10**9) else set()  # it is not used within the context
    named = [name for name, value in windows_of(config).items() if value < context and name not in known]
    if not named:
        return None
    small = short_windows(model, context)
    wrong = "no small model shows what they do" if small is None else wrong_trees(small, way or Way())
    return None if wrong is None else f"of its {', '.join(named)}: {wrong}"


def _limited_trees(model: Any, config: Any, limited: list[str], context: int) -> tuple[Way, str | None]:
    """Tries trees with limited masks on a small model; returns the way of ``model``, or why there is none."""
    if others := sorted(set(limited) - set(_WINDOWS)):
        return Way(), f"its {', '.join(others)} layers cannot be computed as prefix trees"
    small = short_windows(model, context)
    if small is None:
        return Way(), f"no small model shows whether its {', '.join(limited)} layers can be computed as prefix trees"
    whys = []
    for form, of_small in zip(_forms(config), _forms(small.config.get_text_config(decoder=True)), strict=True):
        why = wrong_trees(small, of_small)
        if why is None:
            why = wrong_trees(model, form)
        if why is None:
            return form, None
        whys.append(why)
    return Way(), whys[0]


def _forms(config: Any) -> Iterator[Way]:
    """Yields the forms in which a model may take the masks of its layers: by kind, or one for all."""
    window, chunk = (getattr(config, name, None) for name in _WINDOWS.values())
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    reaches = {"full_attention": Reach(), "sliding_attention": Reach(window=window)}
    if chunk is not None:
        reaches["chunked_attention"] = Reach(chunk=chunk)
    if len(kinds) == 1:
        yield from (Way(reaches={"": reaches[next(iter(kinds))]}, added=add) for add in (False, True))
    yield from (Way(reaches=reaches, added=add) for add in (False, True))


def masks_of(way: Way, ends: Tensor, positions: Tensor, dtype: torch.dtype) -> Any:
    """Makes the dense masks of trees as a model takes them: one, or one for each kind of layer.

    Args:
        way: Way of the model.
        ends: int64 ``[trees, length]`` index after each node's last descendant.
        positions: int64 ``[trees, length]`` depth of each node.
        dtype: Dtype of a mask that is added to the scores.
    """

    def mask(reach: Reach | None) -> Tensor:
        seen = tree_mask(ends, positions, reach)
        return added(seen, dtype) if way.added else seen

    if not way.reaches or "" in way.reaches:
        return mask(way.reaches.get(""))
    return {name: mask(reach) for name, reach in way.reaches.items()}


@torch.no_grad()
def wrong_trees(model: Any, way: Way) -> str | None:
    """Returns why a model cannot compute prefix trees with the masks of a way; ``None`` if it can."""
    first, second = _sequences(model)
    tree = PrefixTree()
    paths = [node for sequence in (first, second) for node in tree.add(sequence)]
    ends, positions = (torch.tensor([one], device=model.device) for one in (tree.ends, tree.positions))
    masks = masks_of(way, ends, positions, next(model.parameters()).dtype)
    try:
        together = _states(model, [tree.token_ids], position_ids=positions, attention_mask=masks)[0, paths]
    except FAULTS as error:
        return f"it does not accept an attention mask for trees ({type(error).__name__}: {error})"
    return _gap(model, together, _alone(model, first, second), "that shares a row with it")


@torch.no_grad()
def wrong_rows(model: Any, rows: str) -> str | None:
    """Returns why a model computes ``packed`` or ``padded`` rows wrongly; ``None`` if it does not."""
    first, second = _sequences(model)
    short = second[: LENGTH - 4]
    expected = torch.cat([_states(model, [one])[0] for one in (first, short)])
    try:
        if rows == "padded":
            found = _states(model, [first, short + [0] * 4])
            found = torch.cat([found[0], found[1, : len(short)]])
        else:
            found = _states(model, [first + short], **packed_inputs([LENGTH, len(short)], model.device))[0]
    except FAULTS as error:
        return f"it does not accept {rows} rows ({type(error).__name__}: {error})"
    return _gap(model, found, expected, "after it, or that shares a batch with it")


def packed_inputs(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Makes the arguments by which layers keep packed sequences apart: positions, bounds and numbers of sequences."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    counts = torch.tensor(lengths, device=device)
    return {
        "position_ids": torch.cat([torch.arange(length, device=device) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)[None].int(),
    }


def _sequences(model: Any) -> tuple[list[int], list[int]]:
    ids = ids_of(model, 2 * LENGTH - SHARED)
    return ids[:LENGTH], ids[:SHARED] + ids[LENGTH:]


def _alone(model: Any, *sequences: list[int]) -> Tensor:
    return torch.cat([_states(model, [one])[0] for one in sequences])


def _states(model: Any, rows: list[list[int]], **how: Any) -> Tensor:
    ids = torch.tensor(rows, device=model.device)
    return decoder_of(model)(input_ids=ids, use_cache=False, **how).last_hidden_state.float()


def _gap(model: Any, found: Tensor, expected: Tensor, which: str) -> str | None:
    gap = ((found - expected).abs().mean() / expected.abs().mean()).item()
    if gap <= TOLERANCE.get(next(model.parameters()).dtype, COARSE):  # false for NaN
        return None
    if not math.isfinite(gap):
        return "its hidden states are all 0, or hold NaN or infinity: its weights are damaged"
    return f"tokens of one sequence depend on another {which} (by {gap:.1%} on average)"
