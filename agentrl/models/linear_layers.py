"""The linear layers of a model that can get adapters, found by their modules.

Guarantees: none of them is an embedding, the output head, an expert whose weights are stacked in one tensor, or a layer
that shares its weight with another one (Zamba 2): merged, their adapters would make two weights of one. Those of the
image tower and its projector are told apart from those of the text by where their weights belong, never by names.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from agentrl.models.decoder import decoder_of
from agentrl.models.pixels import vision_parameters


class LinearLayer(NamedTuple):
    """A linear layer of a model.

    Attributes:
        path: Name of its module in the model.
        text: Whether it is of the text side; in a model without an image tower all are.
    """

    path: str
    text: bool

    @property
    def name(self) -> str:
        """Last part of its path."""
        return self.path.rpartition(".")[2]


def linear_layers(model: Any) -> Iterator[LinearLayer]:
    """Yields a model's linear layers, without embeddings and output head: all of a head of the model's own form."""
    kept = (model.get_output_embeddings(), model.get_input_embeddings())
    inside = {id(module) for module in decoder_of(model).modules()}
    uses = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    beside = {id(parameter) for parameter in vision_parameters(model)}
    for path, module in model.named_modules():
        linear = isinstance(module, (nn.Linear, Conv1D)) and id(module) in inside
        if linear and uses[id(module.weight)] == 1 and not any(module is one for one in kept):
            yield LinearLayer(path, id(module.weight) not in beside)


def stacked_share(model: Any) -> float:
    """Returns the share of a model's parameters that lie in stacked weights of experts, which get no adapters."""
    beside = {id(parameter) for parameter in vision_parameters(model)}
    own = [m.parameters(recurse=False) for m in model.modules() if not isinstance(m, _ConvNd)]
    sizes = [p.numel() for some in own for p in some if p.ndim == 3 and len(p) > 1 and id(p) not in beside]
    return sum(sizes) / max(sum(p.numel() for p in model.parameters()), 1)


def text_targets(model: Any) -> list[str]:
    """Returns the names by which the linear layers of the text side are found, and no others.

    The last part of a layer's path where no other module has the same one, else whole paths: of an image tower, and of
    lists of layers, whose parts are numbers.
    """
    text = {one.path: one.name for one in linear_layers(model) if one.text}
    others = {path.rpartition(".")[2] for path, _ in model.named_modules() if path not in text}
    return sorted({path if name in others else name for path, name in text.items()})
