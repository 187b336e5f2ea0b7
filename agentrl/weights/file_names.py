"""Gives weights the names and shapes that they have in a model's files, which are those that SGLang and vLLM read.

transformers stacks experts, splits or fuses projections and renames parts when it reads a model; a server does its own.
Guarantees: what :func:`file_weights` returns is what ``save_pretrained`` would write, in the same order on all ranks;
a weight that stands in the files as it is stays as it is; of those that are converted, the tensors of one layer at most
exist a second time. Names and shapes are found by converting tensors without memory.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl.weights.file_cuts import Cut, find_cuts
from agentrl.weights.gather import Weight, full_tensor

Named = tuple[str, Weight]
_LAYER = re.compile(r"^(.*?\.\d+)\.")
_LISTED = 3  # most names in an error message


@dataclass
class _Converted:
    """Tensors that weights are converted to together.

    Attributes:
        model: Model whose conversion is reverted.
        weights: Weights that are converted.
        names: Names of the tensors, in the order in which they are taken.
        tensors: Tensors that are still to be taken.
    """

    model: Any
    weights: list[Named]
    names: list[str]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str) -> Tensor:
        """Returns a tensor; a collective. Weights are gathered anew unless the tensor before was taken just now."""
        place = self.names.index(name)
        if place == 0 or list(self.tensors) != self.names[place:]:
            gathered = {given: full_tensor(weight) for given, weight in self.weights}
            found = revert_weight_conversion(self.model, gathered)
            self.tensors = {one: found[one] for one in self.names[place:]}
        return self.tensors.pop(name)


@dataclass(frozen=True, eq=False)
class FileWeight:
    """A tensor of a model's files that is made of its weights.

    Attributes:
        name: Name in the files.
        shape: Shape in the files.
        requires_grad: Whether a weight that it is made of is trained.
        converted: Tensors that are made together with it.
        cut: Box of one weight that it is, so that each rank has its part of it; ``None`` if it is computed.
    """

    name: str
    shape: torch.Size
    requires_grad: bool
    converted: _Converted
    cut: Cut | None = None

    def full_tensor(self) -> Tensor:
        """The tensor, without its graph, on every rank; a collective."""
        return self.converted.take(self.name)


def file_weights(model: Any, weights: Iterable[Named]) -> list[Named]:
    """Returns a model's weights as its files have them.

    Args:
        model: Causal LM of transformers, as it was loaded.
        weights: Names and weights of the loaded model, tied copies left out.
    """
    named = list(weights)
    kept, groups = _groups(model, [(name, tuple(weight.shape)) for name, weight in named])
    by_name, made = dict(named), []
    for name, weight in named:
        if name in kept:
            made.append((kept[name], weight))
        elif group := groups.pop(name, None):  # at the place of the first weight of a group
            made += _converted(model, [(given, by_name[given]) for given in group.given], group.found)
    return made


@dataclass(frozen=True)
class _Group:
    given: list[str]
    found: dict[str, torch.Size]


def _groups(model: Any, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[dict[str, str], dict[str, _Group]]:
    """Finds which weights only get another name, and which are converted together.

    Returns:
        Name in the model -> name in the files of those that are not converted; and first name of a group -> group.
    """
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes}
    whole = revert_weight_conversion(model, dict(empty))
    owners = {id(tensor): name for name, tensor in empty.items()}
    kept = {owners[id(tensor)]: name for name, tensor in whole.items() if id(tensor) in owners}
    rest = {name: tensor for name, tensor in empty.items() if name not in kept}
    wanted = {name: tensor.shape for name, tensor in whole.items() if id(tensor) not in owners}
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in rest.items():
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else name, {})[name] = tensor
    groups = [_Group(list(one), _shapes(revert_weight_conversion(model, dict(one)))) for one in layers.values()]
    together = {name: shape for group in groups for name, shape in group.found.items()}
    if together != wanted:  # some are converted across layers
        groups = [_Group(list(rest), wanted)]
    return kept, {group.given[0]: group for group in groups if group.given}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _converted(model: Any, given: list[Named], found: Mapping[str, torch.Size]) -> Iterator[Named]:
    source = _Converted(model, given, list(found))
    trained = any(weight.requires_grad for _, weight in given)
    cuts = find_cuts(model, dict(given))
    for name, shape in found.items():
        yield name, FileWeight(name, shape, trained, source, cuts.get(name))


def file_buffers(model: Any, names: Iterable[str], folder: Path) -> dict[str, Tensor]:
    """Returns a model's buffers as its files have them, by their names there; those that the files lack are left out.

    Nothing trains them, but a server that makes a layer anew at a push loses those of the layer that it is not sent.

    Args:
        model: Causal LM of transformers, as it was loaded.
        names: Names of the loaded model's buffers that belong to its files.
        folder: Folder of the model that the servers were started with.
    """
    empty = {name: torch.empty(0, device="meta") for name in names}
    wanted = {
        one for name in revert_weight_conversion(model, empty) for one in _spellings(name, model.base_model_prefix)
    }
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")) if wanted else ():
        with safe_open(str(file), framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys() if name in wanted}  # noqa: SIM118
    return found


def wrong_names(weights: Iterable[Named], folder: Path, prefix: str) -> str | None:
    """Returns which weights a model's files do not have, so that a server would not know them; ``None`` if it does.

    Args:
        weights: Names and weights as they are sent.
        folder: Folder of the model that the servers were started with.
        prefix: Name of the decoder in the model; files may have their names with it or without it.
    """
    known = shapes_in_files(folder)
    if not known:
        return None
    wrong = []
    for name, weight in weights:
        shape = next((known[one] for one in _spellings(name, prefix) if one in known), None)
        if shape != tuple(weight.shape):
            there = "which the files lack" if shape is None else f"which is {list(shape)} in the files"
            wrong.append(f"{name} {list(weight.shape)}, {there}")
    if not wrong:
        return None
    more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return f"{'; '.join(wrong[:_LISTED])}{more}"


def _spellings(name: str, prefix: str) -> tuple[str, str, str]:
    """Names that a tensor may have in files: its own, without the decoder's name, and with it."""
    return name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"


def shapes_in_files(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors in a folder's safetensors files; none if it has no such files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found
