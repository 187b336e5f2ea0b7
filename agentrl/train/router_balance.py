"""The load-balancing loss of a mixture of experts, as the model's own class defines it.

Guarantees: the routers' logits are those of the same forward pass; padding is left out; a token that several sequences
share is counted once, as it is computed once. An update's loss is the mean over its micro-batches of all ranks, each
weighted by its computed tokens, so that its strength follows from the coefficient alone: not from the number of
micro-batches or ranks, nor from how the objective weighs tokens, nor from how many groups have an advantage.
"""

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agentrl.config.errors import UserError
from agentrl.train.micro_batch import MicroBatch

FUNCTION = "load_balancing_loss_func"  # its name in the modules of transformers' classes


class NoRouters(UserError, ValueError):
    """A model has no load-balancing loss; the message names its class."""


def balancing_function(model: Any) -> Callable[..., Any]:
    """Returns the load-balancing loss that a model's class uses.

    Raises:
        NoRouters: The class has none.
    """
    for kind in type(model).__mro__:  # FSDP2 makes a subclass
        found = getattr(sys.modules.get(kind.__module__), FUNCTION, None)
        if found is not None:
            return found
    raise NoRouters(
        f"trainer.router_aux_loss: {type(model).__name__} has no load-balancing loss in transformers; set it to 0"
    )


def router_loss(model: Any, router_logits: Any, batch: MicroBatch) -> Tensor:
    """Computes the load-balancing loss of a micro-batch.

    Args:
        model: Causal LM with experts.
        router_logits: Logits that the decoder returned, of each layer.
        batch: The micro-batch.

    Returns:
        A float32 scalar; 1 times the number of chosen experts if all experts are chosen equally.

    Raises:
        NoRouters: None of its layers has a router, as its config says.
    """
    if not router_logits:
        raise NoRouters(f"trainer.router_aux_loss: no layer of this {type(model).__name__} has a router; set it to 0")
    config = model.config.get_text_config(decoder=True)
    experts = getattr(model, "num_experts", None) or getattr(config, "num_experts", None) or config.num_local_experts
    chosen = getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok
    function = balancing_function(model)
    more = {"num_keys": math.isqrt(experts)} if "num_keys" in inspect.signature(function).parameters else {}
    used = used_tokens(batch)
    return function(router_logits, num_experts=experts, top_k=chosen, attention_mask=used, **more).float()


def share_of_tokens(batch: MicroBatch, total: int) -> Tensor:
    """Returns the share of an update's computed tokens that a micro-batch has; 0 for one without rows.

    Args:
        batch: The micro-batch.
        total: Computed tokens of all micro-batches of all ranks.
    """
    filled = batch.positions.any() | bool(len(batch.trained))  # one without rows has a single token, at position 0
    return used_tokens(batch).sum() * filled / max(total, 1)


def used_tokens(batch: MicroBatch) -> Tensor:
    """Returns int64 ``[rows, length]``: 1 for tokens of sequences, 0 for padding.

    Padding has position 0; a sequence's first token is the one that position 1 follows, or that begins a row.
    """
    used = batch.positions > 0
    used[:, :-1] |= batch.positions[:, 1:] == 1
    used[:, 0] = True
    return used.to(torch.long)
