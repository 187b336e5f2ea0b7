"""One pass of optimizer updates over a rank's share of a batch; policy and critic both go through it.

Guarantees: gradients of all micro-batches of an update are summed before one optimizer step; the loss is a sum over the
global batch, so FSDP's average over ranks is undone; an update without micro-batches leaves the parameters alone.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.train.layout import Layout
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import accumulate
from agentrl.train.shares import Share


def run_updates(
    module: nn.Module,
    share: Share,
    layout: Layout,
    device: torch.device,
    loss_of: Callable[[MicroBatch], Tensor],
    apply: Callable[[bool], None],
) -> None:
    """Run the updates of a share; a collective.

    Args:
        module: Policy or critic.
        share: This rank's micro-batches.
        layout: Layout of the model.
        device: Device that it computes on.
        loss_of: From a micro-batch to its part of the global batch's loss, already divided by the normalizer.
        apply: Steps the optimizer; called after each update with whether there was any micro-batch.
    """
    module.train()
    ranks, updates = dist.get_world_size(), len(share.parts)
    for part in range(updates):
        any_gradient = False
        for batch, last in share.micro_batches(part, layout, device):
            accumulate(module, last=last)
            (loss_of(batch) * (updates * ranks)).backward()
            any_gradient = True
        apply(any_gradient)
