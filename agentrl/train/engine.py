"""One trainer step over one batch, the same for any number of ranks and micro-batches.

Guarantees: the loss is a weighted sum over tokens divided by a number of the global batch, so packing, micro-batching
and ranks change it by rounding only; gradients are clipped by their global norm; a non-finite gradient skips the update
and says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.config.recipe import TrainerConfig
from agentrl.core.registry import load
from agentrl.train.batch import TrainBatch
from agentrl.train.critic import ValueLearner
from agentrl.train.objective import (
    Objective,
    kl_divergence,
    log_linear_proximal,
    mismatch_weights,
    second_moment_mask,
    sequence_means,
)
from agentrl.train.optimizer import apply_gradients, make_optimizer, set_learning_rate
from agentrl.train.packed import is_packed
from agentrl.train.packing import Row, TrainSequence, first_places
from agentrl.train.plan import collate_rows, plan_rows, share_out
from agentrl.train.policy import MicroBatch, Policy, accumulate, reshard
from agentrl.train.table import TokenTable

# Means over a step's updates: gradient norm (0 where there is none), and the shares that were left out and why.
_OF_AN_UPDATE = ("train/grad_norm", "train/skipped", "train/nonfinite")


@dataclass
class TokenSums:
    """Sums over the trained tokens of a step, reduced over ranks at its end; order of :meth:`tensor`."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl_behavior: float = 0.0
    kl_reference: float = 0.0
    correction: float = 0.0
    tokens: float = 0.0

    def tensor(self) -> Tensor:
        """``[7]`` float64."""
        return torch.tensor(list(vars(self).values()), dtype=torch.float64)


class TrainEngine:
    """Holds the policy and its optimizer, and updates them.

    Args:
        policy: Sharded policy.
        reference: Sharded reference policy for the KL term; needed exactly when ``config.kl_coef > 0``.
        config: The recipe's trainer section.
        device: Where micro-batches go.
        critic: Needed exactly when ``config.advantage`` is ``gae``.
    """

    def __init__(
        self,
        policy: Policy,
        reference: nn.Module | None,
        config: TrainerConfig,
        device: torch.device,
        critic: ValueLearner | None = None,
    ) -> None:
        if (critic is not None) != (config.advantage == "gae"):
            raise ValueError("trainer.advantage=gae needs a critic, and a critic needs it")
        if (reference is not None) != (config.kl_coef > 0):
            raise ValueError("trainer.kl_coef > 0 needs a reference policy, and a reference policy needs it")
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.config = config
        self.device = device
        self.packed = is_packed(policy.model)
        self.objective: Objective = load("objective", config.objective)
        self.optimizer = make_optimizer(policy.parameters(), config, config.learning_rate)

    @property
    def moving_reference(self) -> nn.Module | None:
        """The reference where it is not the starting policy, and so belongs into a checkpoint."""
        return None if self.config.reference == "frozen" else self.reference

    def update(self, batch: TrainBatch, learning_rate: float) -> dict[str, float]:
        """One step; a collective over all ranks, which pass the same batch.

        Returns:
            Metrics, the same on every rank.
        """
        set_learning_rate(self.optimizer, learning_rate)
        metrics: dict[str, float] = {"train/microbatches": 0.0, "train/rows_tokens": 0.0}
        if self.critic is not None:
            metrics |= self.critic.update(batch.valued, learning_rate / self.config.learning_rate)
            if batch.version < self.config.critic_warmup:
                metrics["critic/warmup"] = 1.0
                batch = replace(batch, sequences=[])
        table = self._table(batch)
        sums, worst = TokenSums(), (0.0, -1)
        applied: list[dict[str, float]] = []
        self.policy.train()
        firsts = first_places(batch.sequences)
        parts = share_out(batch.sequences, self.config.minibatches)
        for part in parts:
            rows, plan = self._plan([batch.sequences[i] for i in part], [firsts[i] for i in part])
            for index, rows_of_one in enumerate(plan):
                accumulate(self.policy, last=index == len(plan) - 1)
                scale = len(parts) / batch.normalizer
                worst = max(worst, self._backward(rows_of_one, table, batch.version, scale, sums))
            applied.append(self._apply_gradients(bool(plan)))
            metrics["train/microbatches"] += len(plan)
            metrics["train/rows_tokens"] += sum(len(row) for row in rows)
        self._follow(batch.version + 1)
        metrics |= {"train/learning_rate": learning_rate, "train/signal": batch.signal}
        metrics |= {key: sum(one.get(key, 0.0) for one in applied) / len(applied) for key in _OF_AN_UPDATE}
        if table.kept is not None:
            metrics["train/masked"] = 1.0 - table.kept.float().mean().item() if len(table) else 0.0
        return metrics | self._reduce(sums, worst, batch.normalizer)

    def penalties(self, sequences: Sequence[TrainSequence]) -> list[float]:
        """What KL in the reward takes off for each sequence: ``kl_coef`` times its log ratio to the reference.

        A collective over all ranks, which pass the same sequences.
        """
        assert self.reference is not None
        table = TokenTable.of(sequences, self.device)
        difference = table.behavior - self._scores(self.reference, sequences)
        sums = difference.new_zeros(len(sequences)).index_add(0, table.sequences, difference)
        return (sums * self.config.kl_coef).tolist()

    def _table(self, batch: TrainBatch) -> TokenTable:
        """The batch's tokens, with what the objective needs to know of all of them first."""
        table = TokenTable.of(batch.sequences, self.device)
        if self.config.proximal == "recomputed" or self.config.m2_threshold is not None:
            table.proximal = self._scores(self.policy, batch.sequences)
        if self.config.m2_threshold is not None:
            assert table.proximal is not None
            table.kept = second_moment_mask(table.proximal, table.behavior, self.config.m2_threshold)
        return table

    def _plan(
        self, sequences: Sequence[TrainSequence], firsts: Sequence[int] | None = None
    ) -> tuple[list[Row], list[list[Row]]]:
        """All rows, and this rank's micro-batches."""
        return plan_rows(self.policy.model, sequences, self.config.tokens_per_microbatch, firsts, packed=self.packed)

    @torch.no_grad()
    def _scores(self, policy: nn.Module, sequences: Sequence[TrainSequence]) -> Tensor:
        """``[tokens]`` logprobs of all trained tokens under a policy, on every rank."""
        found = torch.zeros(sum(sum(s.loss_mask) for s in sequences), device=self.device)
        for rows in self._plan(sequences)[1]:
            batch = collate_rows(rows, self.device, packed=self.packed)
            found[batch.origins] = policy(batch)[0]
        dist.all_reduce(found)
        return found

    def _backward(
        self, rows: list[Row], table: TokenTable, version: int, scale: float, sums: TokenSums
    ) -> tuple[float, int]:
        """Accumulate one micro-batch's gradients; returns the largest ``|ratio - 1|`` in it and the id of its token."""
        batch, config = collate_rows(rows, self.device, packed=self.packed), self.config
        logprobs, entropies = self.policy(batch)
        at = batch.origins
        behavior = table.behavior[at]
        loss, clipped, correction = self._policy_loss(logprobs, table, at, version)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * entropies
        if self.reference is not None and config.kl_in == "loss":
            kl = self._reference_kl(batch, logprobs, behavior)
            sums.kl_reference += kl.detach().sum().item()
            loss = loss + config.kl_coef * kl
        total = (loss * table.weights[at]).sum() + logprobs.sum() * 0  # keeps the graph of an empty micro-batch
        (total * (scale * dist.get_world_size())).backward()  # FSDP averages over ranks; the loss is a global sum
        log_ratio = logprobs.detach() - behavior
        sums.loss += total.item()
        sums.entropy += entropies.detach().sum().item()
        sums.clipped += clipped.sum().item()
        sums.correction += correction.sum().item()
        sums.kl_behavior += (torch.expm1(log_ratio) - log_ratio).sum().item()
        sums.tokens += len(log_ratio)
        if not len(log_ratio):
            return 0.0, -1
        deviation, place = torch.expm1(log_ratio).abs().max(0)
        return deviation.item(), int(batch.targets[batch.trained[place]])

    def _policy_loss(
        self, logprobs: Tensor, table: TokenTable, at: Tensor, version: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``[tokens]`` loss, where a bound acted, and the weights of the correction."""
        config, behavior, sequences = self.config, table.behavior[at], table.sequences[at]
        match config.proximal:
            case "recomputed":
                assert table.proximal is not None
                proximal = table.proximal[at]
            case "log_linear":
                proximal = log_linear_proximal(logprobs, behavior, table.versions[at], version)
            case _:
                proximal = behavior
        current, old, advantages = logprobs, proximal, table.advantages[at]
        if config.ratio == "sequence":
            current, old = sequence_means(logprobs, sequences), sequence_means(proximal, sequences)
            advantages = sequence_means(advantages, sequences)
        loss, clipped = self.objective(current, old, advantages, config)
        if loss.shape != logprobs.shape or clipped.shape != logprobs.shape:
            raise ValueError(
                f"trainer.objective={config.objective} gave shapes {tuple(loss.shape)} and {tuple(clipped.shape)} "
                f"for {len(logprobs)} tokens: want a loss, and whether a bound acted, for each token"
            )
        correction = torch.ones_like(behavior)
        if config.correction != "none":
            correction = mismatch_weights(proximal, behavior, sequences, config)
            loss = loss * correction
        if table.kept is not None:
            loss = loss * table.kept[at]
        return loss, clipped, correction

    def _reference_kl(self, batch: MicroBatch, logprobs: Tensor, behavior: Tensor) -> Tensor:
        assert self.reference is not None
        with torch.no_grad():
            reference, _ = self.reference(batch)
        kl = kl_divergence(logprobs, reference, self.config.kl_estimator, self.config.kl_gradient)
        return kl * torch.exp(logprobs - behavior) if self.config.kl_gradient == "weighted" else kl

    @torch.no_grad()
    def _follow(self, version: int) -> None:
        """Move a reference that is not frozen; ``version`` is the policy's now."""
        config = self.config
        if self.reference is None or config.reference == "frozen":
            return
        if config.reference == "reset" and version % config.reference_every:
            return
        keep = config.reference_decay if config.reference == "ema" else 0.0
        for policy in (self.reference, self.policy):
            reshard(policy)
        for old, new in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            old.lerp_(new.to(old.dtype), 1 - keep)

    def _apply_gradients(self, any_gradient: bool) -> dict[str, float]:
        """Clip and step; without any signal, or with a non-finite norm, leave the parameters alone."""
        if not any_gradient:
            return {"train/skipped": 1.0}
        norm = apply_gradients(self.optimizer, self.config.max_grad_norm)
        return {"train/grad_norm": norm} if math.isfinite(norm) else {"train/skipped": 1.0, "train/nonfinite": 1.0}

    def _reduce(self, sums: TokenSums, worst: tuple[float, int], normalizer: float) -> dict[str, float]:
        total = sums.tensor().to(self.device)
        mine = torch.tensor(worst, dtype=torch.float64, device=self.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_reduce(total)
        dist.all_gather(every, mine)
        deviation, token = max(tuple(one.tolist()) for one in every)
        loss, entropy, clipped, kl_behavior, kl_reference, correction, tokens = total.tolist()
        count = max(tokens, 1.0)
        metrics = {
            "train/loss": loss / normalizer,
            "train/entropy": entropy / count,
            "train/clip_fraction": clipped / count,
            "train/kl_behavior": kl_behavior / count,
            "train/ratio_deviation_max": deviation,
            "train/ratio_deviation_token": token,
            "train/tokens": tokens,
        }
        if self.config.correction != "none":
            metrics["train/correction"] = correction / count
        if self.reference is not None and self.config.kl_in == "loss":
            metrics["train/kl_reference"] = kl_reference / count
        return metrics
