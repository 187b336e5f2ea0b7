"""One optimizer update over one batch, the same for any number of ranks and micro-batches.

Guarantees: the loss is a sum over tokens divided by the global batch's token count, so packing, micro-batching and
ranks change it by rounding only; gradients are clipped by their global norm; a non-finite gradient skips the update
and says so.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.config.recipe import TrainerConfig
from agentrl.core.registry import load
from agentrl.train.batch import TrainBatch
from agentrl.train.objective import Objective, kl_k3
from agentrl.train.packing import Row, attention_span, build_rows, plan_microbatches
from agentrl.train.policy import MicroBatch, Policy, accumulate, collate


@dataclass
class TokenSums:
    """Sums over the trained tokens of a step, reduced over ranks at its end; order of :meth:`tensor`."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl_behavior: float = 0.0
    kl_reference: float = 0.0
    tokens: float = 0.0

    def tensor(self) -> Tensor:
        """``[6]`` float64."""
        return torch.tensor(list(vars(self).values()), dtype=torch.float64)


class TrainEngine:
    """Holds the policy and its optimizer, and updates them.

    Args:
        policy: Sharded policy.
        reference: Sharded frozen policy for the KL term; needed exactly when ``config.kl_coef > 0``.
        config: The recipe's trainer section.
        device: Where micro-batches go.
    """

    def __init__(self, policy: Policy, reference: Policy | None, config: TrainerConfig, device: torch.device) -> None:
        if (reference is not None) != (config.kl_coef > 0):
            raise ValueError("trainer.kl_coef > 0 needs a reference policy, and a reference policy needs it")
        self.policy = policy
        self.reference = reference
        self.config = config
        self.device = device
        self.objective: Objective = load("objective", config.objective)
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def update(self, batch: TrainBatch, learning_rate: float) -> dict[str, float]:
        """One step; a collective over all ranks, which pass the same batch.

        Returns:
            Metrics, the same on every rank.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        span = attention_span(self.policy.model.config.get_text_config().hidden_size)
        rows = build_rows(batch.sequences, self.config.tokens_per_microbatch, span)
        plan = plan_microbatches(rows, ranks, self.config.tokens_per_microbatch)[rank]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        sums, deviation = TokenSums(), 0.0
        self.policy.train()
        for index, rows_of_one in enumerate(plan):
            accumulate(self.policy, last=index == len(plan) - 1)
            deviation = max(deviation, self._backward(rows_of_one, batch.loss_tokens, ranks, sums))
        metrics = {"train/learning_rate": learning_rate, "train/signal": batch.signal}
        metrics |= self._apply_gradients(bool(plan))
        metrics |= self._reduce(sums, deviation, batch.loss_tokens)
        metrics["train/microbatches"] = float(len(plan))
        metrics["train/rows_tokens"] = float(sum(len(row) for row in rows))
        return metrics

    def _backward(self, rows: list[Row], loss_tokens: int, ranks: int, sums: TokenSums) -> float:
        """Accumulate one micro-batch's gradients; returns the largest ``|ratio - 1|`` in it."""
        batch = collate(rows, self.device)
        logprobs, entropies = self.policy(batch)
        loss, clipped = self.objective(logprobs, batch.logprobs, batch.advantages, self.config)
        if loss.shape != logprobs.shape or clipped.shape != logprobs.shape:
            raise ValueError(
                f"trainer.objective={self.config.objective} gave shapes {tuple(loss.shape)} and {tuple(clipped.shape)} "
                f"for {len(logprobs)} tokens: want a loss, and whether a bound cut it off, for each token"
            )
        if self.config.entropy_coef > 0:
            loss = loss - self.config.entropy_coef * entropies
        entropies = entropies.detach()
        if self.reference is not None:
            kl = self._reference_kl(batch, logprobs)
            sums.kl_reference += kl.detach().sum().item()
            loss = loss + self.config.kl_coef * kl
        total = loss.sum() + logprobs.sum() * 0  # keeps the graph of an empty micro-batch
        (total * (ranks / loss_tokens)).backward()  # FSDP averages over ranks; the loss is a global sum
        log_ratio = logprobs.detach() - batch.logprobs
        sums.loss += loss.detach().sum().item()
        sums.entropy += entropies.sum().item()
        sums.clipped += clipped.sum().item()
        sums.kl_behavior += (torch.expm1(log_ratio) - log_ratio).sum().item()
        sums.tokens += len(log_ratio)
        return torch.expm1(log_ratio).abs().max().item() if len(log_ratio) else 0.0

    def _reference_kl(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        assert self.reference is not None
        with torch.no_grad():
            reference_logprobs, _ = self.reference(batch)
        return kl_k3(logprobs, reference_logprobs)

    def _apply_gradients(self, any_gradient: bool) -> dict[str, float]:
        """Clip and step; without any signal, or with a non-finite norm, leave the parameters alone."""
        if not any_gradient:
            return {"train/grad_norm": 0.0, "train/skipped": 1.0}
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        value = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        finite = math.isfinite(value)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"train/grad_norm": value if finite else -1.0, "train/skipped": 0.0 if finite else 1.0}

    def _reduce(self, sums: TokenSums, deviation: float, loss_tokens: int) -> dict[str, float]:
        total = sums.tensor().to(self.device)
        largest = torch.tensor([deviation], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        loss, entropy, clipped, kl_behavior, kl_reference, tokens = total.tolist()
        count = max(tokens, 1.0)
        metrics = {
            "train/loss": loss / loss_tokens,
            "train/entropy": entropy / count,
            "train/clip_fraction": clipped / count,
            "train/kl_behavior": kl_behavior / count,
            "train/ratio_deviation_max": largest.item(),
            "train/tokens": tokens,
        }
        if self.reference is not None:
            metrics["train/kl_reference"] = kl_reference / count
        return metrics
