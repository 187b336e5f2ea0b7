"""Record of the experts that a served mixture of experts chooses, which its answers name where they are asked to.

Guarantees: the experts are those of the forward pass that made the cache's entries of the same tokens; a request that
is computed again keeps those with which its tokens were sampled.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from agentrl.engine.request import Request
from agentrl.engine.scheduler import Scheduler
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


def note_experts(runner: Any, slot: int, request: Request) -> None:
    """Keeps the experts of the tokens that a request has computed since they were noted last, if it asked for them.

    Args:
        runner: Runner with a record of experts.
        slot: Slot of the request.
        request: A running request.
    """
    if request.experts_from < 0:
        return
    known = 0 if request.experts is None else len(request.experts)
    end = request.length - 1  # nothing has computed the last token
    more = runner.experts(slot, request.experts_from + known, end).cpu()
    request.experts = more.clone() if request.experts is None else torch.cat([request.experts, more])


def retract(scheduler: Scheduler, runner: Any) -> None:
    """Sends the running requests back to the queue, with the experts of what they have computed."""
    for slot, request in enumerate(scheduler.running):
        note_experts(runner, slot, request)
    scheduler.retract()
