"""Record of the experts that a served mixture of experts chooses, which its answers name where they are asked to.

Guarantees: the experts are those of the forward pass that made the cache's entries of the same tokens.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from agentrl.engine.slots import LayerShape
from agentrl.models.routing import Routers, find_routers


class ExpertRecord:
    """The experts of the latest forward pass of a model.

    Args:
        model: A causal language model.

    Raises:
        NoRouters: It has no routers.
    """

    def __init__(self, model: Any) -> None:
        self._routers: Routers = find_routers(model)
        self._open = ExitStack()  # for as long as the model is served
        self._found = self._open.enter_context(self._routers.recorded())

    @property
    def width(self) -> int:
        """Number of a token's experts in all layers."""
        return self._routers.width

    def take(self) -> Tensor:
        """Returns int16 ``[tokens, width]`` of the latest forward pass, row by row, and forgets it."""
        found = self._found[-1]
        self._found.clear()
        return found

    def shape(self, device: torch.device) -> LayerShape:
        """Shape of a cache entry that holds a token's experts."""
        return LayerShape(1, self.width, 0, torch.int16, device)
