"""Finds tensors of a model's files that are a box of one weight: an expert of the stacked ones, half of a fused matrix.

A rank can write its part of such a tensor, although the files do not have the weight as the model has it. Guarantees:
what is found was compared, place for place, with what the conversion makes; nothing is computed, tensors without memory
are enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

Intervals = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Cut:
    """A box of a weight, with its dimensions in another order.

    Attributes:
        weight: The whole weight, which may be sharded.
        box: For each dimension of the weight, the first index and the one behind the last.
        order: Dimensions of the weight in the order that they have in the box; those left out have size one there.
    """

    weight: Tensor
    box: tuple[tuple[int, int], ...]
    order: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Returns the box of a whole weight, a view."""
        for dimension, (first, end) in enumerate(self.box):
            whole = whole.narrow(dimension, first, end - first)
        return self._ordered(whole)

    def part(self, local: Tensor, found: list[Intervals]) -> tuple[Tensor, list[Intervals]]:
        """Returns what a part of the weight has of the box, and the ranges of the box that it consists of.

        Args:
            local: Part of the weight.
            found: For each dimension the ranges of the whole weight that the part consists of.
        """
        kept: list[Intervals] = []
        for dimension, ((first, end), own) in enumerate(zip(self.box, found, strict=True)):
            inside: Intervals = []
            pieces, place = [local.narrow(dimension, 0, 0)], 0
            for low, high in own:
                start, stop = max(low, first), min(high, end)
                if start < stop:
                    pieces.append(local.narrow(dimension, place + start - low, stop - start))
                    inside.append((start - first, stop - first))
                place += high - low
            local = pieces[-1] if len(pieces) < 3 else torch.cat(pieces[1:], dimension)
            if not local.numel():
                return local, [[] for _ in self.order]
            kept.append(inside)
        return self._ordered(local), [kept[dimension] for dimension in self.order]

    def _ordered(self, box: Tensor) -> Tensor:
        left = [dimension for dimension in range(box.ndim) if dimension not in self.order]
        box = box.permute(*self.order, *left)
        return box[(..., *(0 for _ in left))]


def find_cuts(model: Any, weights: Mapping[str, Any]) -> dict[str, Cut]:
    """Returns the tensors of a model's files that are a box of one weight each.

    Args:
        model: Causal LM of transformers, whose weights are converted when they are saved.
        weights: Names and weights that are converted together; only tensors among them have boxes.
    """
    empty = {name: torch.empty(tuple(weight.shape), device="meta") for name, weight in weights.items()}
    owners = {one.untyped_storage()._cdata: name for name, one in empty.items() if isinstance(weights[name], Tensor)}
    with _Views():
        made = revert_weight_conversion(model, dict(empty))
    found: dict[str, Cut] = {}
    for name, tensor in made.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None or tensor.dtype != empty[owner].dtype:
            continue
        cut = _cut(weights[owner], tensor)
        if cut is not None and _same_places(cut.of(empty[owner]), tensor):
            found[name] = cut
    return found


class _Views(TorchFunctionMode):
    """Keeps views what they are, so that they say where their elements stand."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _cut(weight: Tensor, view: Tensor) -> Cut | None:
    """Returns the box that a view of a contiguous tensor of the weight's shape may be; ``None`` if it is none."""
    if not weight.numel():
        return None
    steps, step = [0] * weight.ndim, 1
    for dimension in reversed(range(weight.ndim)):
        steps[dimension], step = step, step * weight.shape[dimension]
    firsts, offset = [], int(view.storage_offset())
    for one in steps:
        first, offset = divmod(offset, one)
        firsts.append(first)
    order: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        for dimension, first in enumerate(firsts):
            fits = steps[dimension] == stride and first + size <= weight.shape[dimension]
            if fits and dimension not in order:
                order.append(dimension)
                break
        else:
            return None
    sizes = dict(zip(order, view.shape, strict=True))
    box = tuple((first, first + sizes.get(dimension, 1)) for dimension, first in enumerate(firsts))
    return Cut(weight, box, tuple(order))


def _same_places(one: Tensor, other: Tensor) -> bool:
    """Whether two views of a tensor have the same elements in the same places."""
    if one.shape != other.shape or one.storage_offset() != other.storage_offset():
        return False
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or first == second for size, first, second in steps)
