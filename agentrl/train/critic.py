"""The critic: what the rest of an answer is worth before each of its tokens.

Guarantees: it sees what the policy sees (the same rows, the same isolation of neighbours); its loss is a mean over the
trained tokens of the global batch, so micro-batches and ranks change it by rounding only; it starts at 0 everywhere.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.config.recipe import TrainerConfig
from agentrl.train.optimizer import apply_gradients, make_optimizer, set_learning_rate
from agentrl.train.packed import is_packed
from agentrl.train.packing import Row, TrainSequence, first_places
from agentrl.train.plan import collate_rows, plan_rows, share_out
from agentrl.train.policy import MicroBatch, accumulate, hidden_states


class Critic(nn.Module):
    """A decoder with a linear head of one output.

    Args:
        model: Decoder of a Hugging Face causal LM, without its output head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """``[trained]`` values before each trained token, differentiable."""
        states = hidden_states(self.model, batch)
        values = self.head(states[batch.sources])[:, 0].float()[batch.trained]
        return values + states[0, 0] * 0  # an empty micro-batch still takes part in collectives


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``[tokens]`` half the squared error, with a bound on how far a value may move from ``old``.

    PPO's, as in Schulman et al.'s implementation; the larger of the two errors counts.
    """
    error = (values - returns).square()
    if clip is not None:
        bounded = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - returns).square())
    return error / 2


class ValueLearner:
    """Holds the critic and its optimizer.

    Args:
        critic: Sharded or not.
        config: The recipe's trainer section.
        device: Where micro-batches go.
    """

    def __init__(self, critic: Critic, config: TrainerConfig, device: torch.device) -> None:
        self.critic = critic
        self.optimizer = make_optimizer(critic.parameters(), config, config.critic_learning_rate)
        self._config = config
        self._device = device
        self._packed = is_packed(critic.model)

    @torch.no_grad()
    def values(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        """Values before the trained tokens of each sequence; a collective, every rank gets all."""
        counts = [sum(sequence.loss_mask) for sequence in sequences]
        found = torch.zeros(sum(counts), device=self._device)
        for rows in self._plan(sequences):
            batch = collate_rows(rows, self._device, packed=self._packed)
            found[batch.origins] = self.critic(batch)
        dist.all_reduce(found)
        return [part.tolist() for part in found.split(counts)]

    def update(self, sequences: Sequence[TrainSequence], factor: float) -> dict[str, float]:
        """Fit the returns, as often as the policy is updated; a collective.

        Args:
            sequences: With values and returns, the same on every rank.
            factor: Of the learning rate.

        Returns:
            Metrics, the same on every rank; ``critic/explained`` is the share of the returns' variance that the values
            explained before.
        """
        config = self._config
        set_learning_rate(self.optimizer, config.critic_learning_rate * factor)
        old = self._column([s.values for s in sequences], sequences)
        returns = self._column([s.returns for s in sequences], sequences)
        losses = torch.zeros((), dtype=torch.float64, device=self._device)
        norms: list[float] = []
        firsts = first_places(sequences)
        parts = share_out(sequences, config.minibatches)
        self.critic.train()
        for part in parts:
            chosen = [sequences[i] for i in part]
            plan = self._plan(chosen, [firsts[i] for i in part])
            for index, rows in enumerate(plan):
                accumulate(self.critic, last=index == len(plan) - 1)
                batch = collate_rows(rows, self._device, packed=self._packed)
                loss = value_loss(self.critic(batch), old[batch.origins], returns[batch.origins], config.critic_clip)
                total = loss.sum() * (len(parts) / max(len(returns), 1))
                (total * dist.get_world_size()).backward()  # FSDP averages over ranks; the loss is a global sum
                losses += total.detach() / len(parts)
            if plan:
                norms.append(apply_gradients(self.optimizer, config.max_grad_norm))
        dist.all_reduce(losses)
        broken = sum(not math.isfinite(norm) for norm in norms)
        metrics = {
            "critic/loss": losses.item(),
            "critic/grad_norm": sum(norms) / max(len(norms), 1),
            "critic/nonfinite": broken / max(len(norms), 1),
        }
        if len(returns) > 1 and returns.var() > 0:
            metrics["critic/explained"] = 1.0 - ((returns - old).var() / returns.var()).item()
        return metrics

    def _plan(self, sequences: Sequence[TrainSequence], firsts: Sequence[int] | None = None) -> list[list[Row]]:
        """This rank's micro-batches."""
        budget = self._config.tokens_per_microbatch
        return plan_rows(self.critic.model, sequences, budget, firsts, packed=self._packed)[1]

    def _column(self, values: Sequence[Sequence[float]], sequences: Sequence[TrainSequence]) -> Tensor:
        """``[trained]`` numbers of the trained tokens, in the order of the batch's table."""
        found = [
            value
            for of_one, sequence in zip(values, sequences, strict=True)
            for value, trained in zip(of_one, sequence.loss_mask, strict=True)
            if trained
        ]
        return torch.tensor(found, dtype=torch.float32, device=self._device)
