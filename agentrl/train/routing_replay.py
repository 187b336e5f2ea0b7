"""Replay of the rollout's routing in the update: the routers of the policy take the experts that the server chose.

Guarantees: a model whose routers cannot be given experts is refused when it is loaded, with the reason; all forward
passes of a batch with recorded experts replay them, those of a reference policy of its own too; a token without
recorded experts is routed by the policy itself. What the metrics say of differences is measured in the forward pass
before the step's first update.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.models.decoder import decoder_of
from agentrl.models.routing import NoRouters, Routers, find_routers
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import ModelRefused


def keep_routers(model: Any) -> None:
    """Finds the routers of a model, and keeps them on its decoder for its policy.

    Raises:
        ModelRefused: It has none that can be given experts.
    """
    try:
        decoder_of(model).agentrl_routers = find_routers(model)
    except NoRouters as error:
        raise ModelRefused(f"trainer.replay_routing=true: {error}; set it to false") from error


class RoutingDifferences:
    """Sums of how often the policy would have routed otherwise than the server did.

    Args:
        device: Device of the micro-batches.
        mesh: Mesh of the ranks.
    """

    def __init__(self, device: torch.device, mesh: RankMesh) -> None:
        self._mesh = mesh
        # predictions, recorded ones, then tokens with recorded experts, of these differing ones, differing choices
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)

    def add(self, routers: Routers | None, batch: MicroBatch) -> None:
        """Adds the routing of a micro-batch, of which the routers' latest forward pass was.

        Args:
            routers: Routers of the policy; ``None`` if it has none.
            batch: The micro-batch.
        """
        found = None if routers is None else routers.differences()
        self._sums[0] += len(batch.sources)
        if found is None:
            return
        differs, known = found
        own = differs[known]
        counts = (known[batch.sources].sum(), known.sum(), own.any(-1).sum(), own.double().mean(-1).sum())
        self._sums[1:] += torch.stack([one.to(self._sums) for one in counts])

    def metrics(self) -> dict[str, float]:
        """Returns the metrics, the same on every rank; a collective."""
        every: Tensor = self._sums.clone()
        dist.all_reduce(every, group=self._mesh.tokens)
        predictions, recorded, tokens, differing, choices = every.tolist()
        if not predictions:
            return {}
        found = {"routing/recorded": recorded / predictions}
        if tokens:
            found |= {"routing/tokens_differing": differing / tokens, "routing/choices_differing": choices / tokens}
        return found
