"""One pass of optimizer updates over a rank's share of a batch, for policy and critic.

Guarantees: gradients of all micro-batches of an update are summed before its optimizer step; the loss is a sum over the
global batch, so FSDP's average over ranks is undone (ranks of a tensor group compute one gradient together); an update
without micro-batches does not change the parameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from agentrl.train.layout import Layout
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import accumulate
from agentrl.train.shares import Share


def run_updates(
    module: nn.Module,
    share: Share,
    layout: Layout,
    device: torch.device,
    mesh: RankMesh,
    loss_of: Callable[[MicroBatch], Tensor],
    apply: Callable[[bool], None],
) -> None:
    """Runs the updates of a share; a collective.

    Args:
        module: Policy or critic.
        share: This rank's share.
        layout: Layout of the model.
        device: Device of the micro-batches.
        mesh: Mesh of the ranks.
        loss_of: Function of a micro-batch that returns its part of the global batch's loss, divided by the normalizer.
        apply: Function that steps the optimizer; called after each update with whether it had any micro-batch.
    """
    module.train()
    ranks, updates = mesh.averaged, len(share.parts)
    for part in range(updates):
        any_gradient = False
        for batch, last in share.micro_batches(part, layout, device):
            accumulate(module, last=last)
            (loss_of(batch) * (updates * ranks)).backward()
            any_gradient = True
        apply(any_gradient)
