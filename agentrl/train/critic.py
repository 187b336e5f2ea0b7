"""The critic: a value function that predicts the return before each sampled token.

Guarantees: it gets the same rows and attention masks as the policy; its loss is a mean over the trained tokens of the
global batch, so micro-batches and ranks change it only by rounding; its values start at 0.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from agentrl.config.recipe import TrainerConfig
from agentrl.train.batch import TrainBatch
from agentrl.train.branches import Branch, TokenColumns, trained_mask
from agentrl.train.layout_choice import layout_of
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.optimizer import apply_gradients, make_optimizer, set_learning_rate
from agentrl.train.policy import hidden_states
from agentrl.train.shares import Share, Work, distribute
from agentrl.train.update_loop import run_updates


class Critic(nn.Module):
    """A value function: a decoder with a linear head of one output.

    Args:
        model: Decoder of a Hugging Face causal LM, without its output head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(model.config.get_text_config(decoder=True).hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Returns ``[trained]`` values before each trained token, differentiable."""
        states = hidden_states(self.model, batch, sharded=isinstance(self, FSDPModule))
        values = self.head(states[batch.sources])[:, 0].float()[batch.trained]
        return values + states[0, 0] * 0  # an empty micro-batch still takes part in collectives


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Computes the clipped value loss of PPO, as in Schulman et al.'s implementation.

    Args:
        values: ``[tokens]`` values of the current critic.
        old: ``[tokens]`` values before the step.
        returns: ``[tokens]`` targets.
        clip: Largest change of a value from ``old`` (the larger of the clipped and the plain error counts); ``None``
            for no bound.

    Returns:
        ``[tokens]`` half the squared error.
    """
    error = (values - returns).square()
    if clip is not None:
        bounded = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - returns).square())
    return error / 2


class ValueLearner:
    """Holds the critic and its optimizer.

    Every method is a collective over all ranks; rank 0 passes the batch, the others ``None``.

    Args:
        critic: The critic, sharded or not.
        config: The recipe's trainer section.
        device: Device of the micro-batches.
        mesh: Mesh of the ranks; by default all are shards of one replica.
    """

    def __init__(
        self, critic: Critic, config: TrainerConfig, device: torch.device, mesh: RankMesh | None = None
    ) -> None:
        self.critic = critic
        self.optimizer = make_optimizer(critic.parameters(), config, config.critic_learning_rate)
        self._mesh = mesh or RankMesh.of_world(device)
        self.layout = layout_of(critic.model, self._mesh)
        self._config = config
        self._device = device

    def values(self, branches: Sequence[Branch] | None, tokens: TokenColumns | None) -> NDArray[np.float64]:
        """Returns ``[places]`` values before the trained tokens and at the bootstrap positions, on every rank."""
        work = None if branches is None or tokens is None else Work(branches, tokens)
        found = self._share(work).gather(self.layout, self._device, self.critic)
        return found.double().cpu().numpy()

    def update(self, batch: TrainBatch | None, factor: float) -> dict[str, float]:
        """Fits the critic to the returns, with as many optimizer updates as the policy gets.

        Args:
            batch: Batch with values and returns.
            factor: Factor on the learning rate.

        Returns:
            Metrics, the same on every rank; ``critic/explained`` is the fraction of the returns' variance that the
            values explained before the update.
        """
        config = self._config
        set_learning_rate(self.optimizer, config.critic_learning_rate * factor)
        work = None
        if batch is not None:
            notes = _explained(batch)
            work = Work(batch.valued, batch.tokens, max(notes["tokens"], 1.0), batch.version, notes)
        share = self._share(work, config.minibatches)
        losses = torch.zeros((), dtype=torch.float64, device=self._device)
        norms: list[float] = []

        def loss_of(one: MicroBatch) -> torch.Tensor:
            values = self.critic(one)
            loss = value_loss(values, one.columns["values"], one.columns["returns"], config.critic_clip)
            total = loss.sum() / share.normalizer
            losses.add_(total.detach())
            return total

        def apply(any_gradient: bool) -> None:
            if any_gradient:
                norms.append(apply_gradients(self.optimizer, config.max_grad_norm))

        run_updates(self.critic, share, self.layout, self._device, self._mesh, loss_of, apply)
        dist.all_reduce(losses, group=self._mesh.tokens)
        broken = sum(not math.isfinite(norm) for norm in norms)
        metrics = {"critic/nonfinite": broken / max(len(norms), 1)}
        if norms:
            metrics |= {"critic/loss": losses.item(), "critic/grad_norm": sum(norms) / len(norms)}
        if "explained" in share.notes:
            metrics["critic/explained"] = share.notes["explained"]
        return metrics

    def _share(self, work: Work | None, updates: int = 1) -> Share:
        return distribute(work, self.layout, self._config.tokens_per_microbatch, self._mesh, updates)


def _explained(batch: TrainBatch) -> dict[str, float]:
    """Counts the critic's tokens, and computes the fraction of their returns' variance that the values explain."""
    chosen = trained_mask(batch.valued, batch.tokens)
    returns, values = (batch.tokens.sampled[name][chosen].astype(np.float64) for name in ("returns", "values"))
    found = {"tokens": float(len(returns))}
    if len(returns) > 1 and returns.var() > 0:
        found["explained"] = float(1.0 - (returns - values).var() / returns.var())
    return found
