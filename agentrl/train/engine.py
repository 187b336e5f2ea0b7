"""One trainer step over one batch, the same for any number of ranks and micro-batches.

Guarantees: the loss is a weighted sum over tokens divided by a number of the global batch, so packing, micro-batching
and ranks change it by rounding only; gradients are clipped by their global norm; a non-finite gradient skips the update
and says so.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

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
from agentrl.train.policy import Policy, accumulate, reshard
from agentrl.train.table import TokenTable

SUMS = ("loss", "entropy", "clipped", "kl_behavior", "kl_reference", "correction", "tokens")  # over tokens
# Means over a step's updates: gradient norm (0 where there is none), and the shares that were left out and why.
_OF_AN_UPDATE = ("train/grad_norm", "train/skipped", "train/nonfinite")


class TokenSums:
    """Sums over the trained tokens of a step, on the device: reading one would wait for it.

    Attributes:
        values: ``[7]`` float64, in the order of :data:`SUMS`; to be reduced over ranks.
        worst: ``[2]`` float64, the largest ``|ratio - 1|`` and the id of its token.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.worst = torch.tensor([0.0, -1.0], dtype=torch.float64, device=device)

    def add(self, **sums: Tensor) -> None:
        """Add scalars by name; a name of :data:`SUMS` that is missing adds nothing."""
        nothing = self.values.new_zeros(())
        self.values += torch.stack([sums.get(name, nothing).detach().double() for name in SUMS])

    def see(self, deviations: Tensor, tokens: Tensor) -> None:
        """Remember the largest of some deviations, and its token."""
        if len(deviations):
            largest, place = deviations.max(0)
            found = torch.stack([largest.double(), tokens[place].double()])
            self.worst = torch.where(found[0] > self.worst[0], found, self.worst)


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
        sums = TokenSums(self.device)
        applied: list[dict[str, float]] = []
        self.policy.train()
        firsts = first_places(batch.sequences)
        parts = share_out(batch.sequences, self.config.minibatches)
        for part in parts:
            rows, plan = self._plan([batch.sequences[i] for i in part], [firsts[i] for i in part])
            for index, rows_of_one in enumerate(plan):
                accumulate(self.policy, last=index == len(plan) - 1)
                scale = len(parts) / batch.normalizer
                self._backward(rows_of_one, table, batch.version, scale, sums)
            applied.append(self._apply_gradients(bool(plan)))
            metrics["train/microbatches"] += len(plan)
            metrics["train/rows_tokens"] += sum(len(row) for row in rows)
        self._follow(batch.version + 1)
        metrics |= {"train/learning_rate": learning_rate, "train/signal": batch.signal}
        metrics |= {key: sum(one.get(key, 0.0) for one in applied) / len(applied) for key in _OF_AN_UPDATE}
        if table.kept is not None:
            metrics["train/masked"] = 1.0 - table.kept.float().mean().item() if len(table) else 0.0
        return metrics | self._reduce(sums, batch.normalizer)

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

    def _backward(self, rows: list[Row], table: TokenTable, version: int, scale: float, sums: TokenSums) -> None:
        """Accumulate one micro-batch's gradients."""
        batch, config = collate_rows(rows, self.device, packed=self.packed), self.config
        reference: Tensor | None = None
        if self.reference is not None and config.kl_in == "loss":
            with torch.no_grad():
                reference, _ = self.reference(batch)

        def loss_of(chosen: Tensor, logprobs: Tensor, entropies: Tensor) -> Tensor:
            at = batch.origins[chosen]
            behavior = table.behavior[at]
            loss, clipped, correction = self._policy_loss(logprobs, table, at, version)
            if config.entropy_coef > 0:
                loss = loss - config.entropy_coef * entropies
            if reference is not None:
                kl = self._reference_kl(reference[chosen], logprobs, behavior)
                sums.add(kl_reference=kl.sum())
                loss = loss + config.kl_coef * kl
            total = (loss * table.weights[at]).sum()
            log_ratio = logprobs.detach() - behavior
            sums.add(
                loss=total,
                entropy=entropies.sum(),
                clipped=clipped.sum(),
                correction=correction.sum(),
                kl_behavior=(torch.expm1(log_ratio) - log_ratio).sum(),
                tokens=log_ratio.new_tensor(len(log_ratio)),
            )
            sums.see(torch.expm1(log_ratio).abs(), batch.targets[batch.trained[chosen]])
            return total + logprobs.sum() * 0  # a graph, whatever the objective made of them

        if self._by_token:
            total = self.policy(batch, loss_of)
        else:
            total = loss_of(torch.arange(len(batch.trained), device=self.device), *self.policy(batch))
        (total * (scale * dist.get_world_size())).backward()  # FSDP averages over ranks; the loss is a global sum

    @property
    def _by_token(self) -> bool:
        """Whether a token's loss needs nothing of the other tokens of its sequence."""
        config = self.config
        return config.ratio == "token" and (config.correction == "none" or config.correction_level == "token")

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

    def _reference_kl(self, reference: Tensor, logprobs: Tensor, behavior: Tensor) -> Tensor:
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

    def _reduce(self, sums: TokenSums, normalizer: float) -> dict[str, float]:
        every = [torch.empty_like(sums.worst) for _ in range(dist.get_world_size())]
        dist.all_reduce(sums.values)
        dist.all_gather(every, sums.worst)
        deviation, token = max(tuple(one.tolist()) for one in every)
        loss, entropy, clipped, kl_behavior, kl_reference, correction, tokens = sums.values.tolist()
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
