"""One trainer step over one batch, the same for any number of ranks and micro-batches.

Guarantees: the loss is a weighted sum over tokens divided by one normalizer of the global batch, so packing,
micro-batches and ranks change it only by rounding (the routers' loss alone is a mean over micro-batches, see
:mod:`agentrl.train.router_balance`); gradients are clipped by their global norm; with a non-finite
gradient the update is skipped and counted in ``train/nonfinite``; entropy and mismatch are measured before the first
update, and what is computed for metrics alone changes no gradient. The loss is defined in :mod:`agentrl.train.loss`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentrl.config.recipe import TrainerConfig
from agentrl.core.registry import load
from agentrl.train.batch import TrainBatch
from agentrl.train.batch_selection import Selection, needs_selection, select_tokens
from agentrl.train.branches import Branch, TokenColumns, trained_mask
from agentrl.train.context_parallel import SharedBatch
from agentrl.train.critic import ValueLearner
from agentrl.train.layout_choice import layout_of
from agentrl.train.loss import (
    LossTokens,
    Objective,
    needs_whole_sequences,
    proximal_logprobs,
    token_losses,
)
from agentrl.train.measured import Measured
from agentrl.train.mesh import RankMesh
from agentrl.train.metric_sample import sample_branches, tokens_to_compute
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.optimizer import apply_gradients, make_optimizer, set_learning_rate
from agentrl.train.policy import Policy, reshard, routers_of
from agentrl.train.router_balance import share_of_tokens
from agentrl.train.routing_replay import RoutingDifferences
from agentrl.train.shares import Share, Work, distribute, share_out
from agentrl.train.token_sums import TokenSums
from agentrl.train.update_loop import run_updates

_FRACTIONS_OF_UPDATES = ("train/skipped", "train/nonfinite")


class PolicyLearner:
    """Holds the policy, its reference, its critic and its optimizer, and updates them.

    Every method is a collective over all ranks; rank 0 passes the batch, the others ``None``.

    Args:
        policy: Sharded policy.
        reference: Sharded reference policy of the KL term; needed exactly when ``config.kl_coef > 0``.
        config: The recipe's trainer section.
        device: Device of the micro-batches.
        critic: Learner of the critic; needed exactly when ``config.advantage`` is ``gae``.
        mesh: Mesh of the ranks; by default all are shards of one replica.
    """

    def __init__(
        self,
        policy: Policy,
        reference: nn.Module | None,
        config: TrainerConfig,
        device: torch.device,
        critic: ValueLearner | None = None,
        mesh: RankMesh | None = None,
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
        self.mesh = mesh or RankMesh.of_world(device)
        self.layout = layout_of(policy.model, self.mesh)
        self.objective: Objective = load("objective", config.objective)
        self.optimizer = make_optimizer(policy.parameters(), config, config.learning_rate)
        self.measured = Measured(device, self.mesh)  # of the latest step, from before its first update
        self._routing = RoutingDifferences(device, self.mesh)  # of the latest step
        self._by_token = not needs_whole_sequences(config)

    @property
    def moving_reference(self) -> nn.Module | None:
        """The reference policy if it changes during training and so belongs in a checkpoint; else ``None``."""
        return None if self.config.reference == "frozen" else self.reference

    def update(self, batch: TrainBatch | None, learning_rate: float) -> dict[str, float]:
        """Runs one trainer step.

        Args:
            batch: The batch on rank 0, ``None`` on the others.
            learning_rate: Learning rate of the policy in this step.

        Returns:
            Metrics, the same on every rank.
        """
        config = self.config
        set_learning_rate(self.optimizer, learning_rate)
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics |= self.critic.update(batch, learning_rate / config.learning_rate)
        drawn = [] if batch is None else self._sample(batch)
        share = self._share(self._work(batch, len(drawn)), config.minibatches)
        measured, sums = Measured(self.device, self.mesh), TokenSums(self.device, self.mesh)
        self.measured, self._routing = measured, RoutingDifferences(self.device, self.mesh)
        if share.notes["drawn"]:
            work = None if batch is None else Work(drawn, batch.tokens)
            self._measure(self._share(work), measured, weighted=True)
            if not any(share.parts):  # no backward pass follows
                reshard(self.policy)
        proximal, selection = self._before_updates(share, measured)
        metrics |= self._run_updates(share, proximal, selection, sums, measured)
        self._update_reference(share.version + 1)
        metrics |= {
            "train/microbatches": float(sum(map(len, share.parts))),
            "train/rows_tokens": float(share.row_tokens),
            "train/learning_rate": learning_rate,
            "train/signal": share.notes["signal"],
        }
        sampled = share.notes["sampled"]
        metrics |= measured.metrics(config, share.version, sampled) | sums.metrics(config, share.normalizer, sampled)
        metrics |= selection.shares
        if config.replay_routing:
            metrics |= self._routing.metrics()
        if share.notes["warmup"]:
            metrics["critic/warmup"] = 1.0
            metrics.pop("train/loss", None)  # of no token
        return metrics

    def _run_updates(
        self, share: Share, proximal: Tensor | None, selection: Selection, sums: TokenSums, measured: Measured
    ) -> dict[str, float]:
        """Makes the updates, and returns metrics of them."""
        applied: list[dict[str, float]] = []

        def loss_of(one: MicroBatch) -> Tensor:
            first = not applied and not self._recomputes
            return self._loss(one, share, proximal, selection, sums, measured if first else None)

        def apply(any_gradient: bool) -> None:
            applied.append(self._apply_gradients(any_gradient))

        run_updates(self.policy, share, self.layout, self.device, self.mesh, loss_of, apply)
        return _mean_over_updates(applied)

    def penalties(self, branches: Sequence[Branch] | None, tokens: TokenColumns | None) -> NDArray[np.float64] | None:
        """Returns, on rank 0, ``[sampled]`` KL penalties of each token's reward: ``kl_coef`` times the log ratio."""
        assert self.reference is not None
        work = None if branches is None or tokens is None else Work(branches, tokens)
        reference = self._scores(self.reference, self._share(work)).double().cpu().numpy()
        if work is None:
            return None
        trained = trained_mask(work.branches, work.tokens)
        return self.config.kl_coef * np.where(trained, work.tokens.sampled["behavior"] - reference, 0.0)

    def _work(self, batch: TrainBatch | None, drawn: int) -> Work | None:
        """Returns the work of a policy update.

        Args:
            batch: The batch on rank 0, ``None`` on the others.
            drawn: Number of branches that are computed for metrics alone.
        """
        if batch is None:
            return None
        notes = {
            "signal": batch.signal,
            "warmup": float(self._warms_up(batch)),
            "sampled": float(trained_mask([*batch.branches, *batch.idle], batch.tokens).sum()),
            "drawn": float(drawn),
        }
        return Work(self._updated(batch), batch.tokens, batch.normalizer, batch.version, notes)

    def _warms_up(self, batch: TrainBatch) -> bool:
        return self.critic is not None and batch.version < self.config.critic_warmup

    def _updated(self, batch: TrainBatch) -> list[Branch]:
        """Returns the branches of the policy's updates: none during the warmup, when only the critic learns."""
        return [] if self._warms_up(batch) else batch.branches

    def _sample(self, batch: TrainBatch) -> list[Branch]:
        """Draws from the branches that neither a recomputation nor the first update computes."""
        updated, tokens = self._updated(batch), batch.tokens
        first = range(len(updated)) if self._recomputes else share_out(updated, tokens, self.config.minibatches)[0]
        computed = {updated[index].number for index in first}
        rest = [branch for branch in (*batch.branches, *batch.idle) if branch.number not in computed]
        if not rest or not self.config.metric_share:
            return []
        budget = self.config.metric_share * tokens_to_compute(updated or rest, tokens)
        return sample_branches(rest, tokens, budget, batch.version)

    def _share(self, work: Work | None, updates: int = 1) -> Share:
        return distribute(work, self.layout, self.config.tokens_per_microbatch, self.mesh, updates)

    def _scores(self, policy: nn.Module, share: Share) -> Tensor:
        """Computes ``[places]`` logprobs of all trained tokens under a policy, on every rank."""
        return share.gather(self.layout, self.device, lambda batch: policy(batch)[0])

    def _measure(self, share: Share, measured: Measured, *, weighted: bool = False) -> Tensor:
        """Computes ``[places]`` logprobs of all trained tokens, on every rank, and adds the tokens to ``measured``."""

        def compute(batch: MicroBatch) -> Tensor:
            logprobs, entropies = self.policy(batch)
            self._routing.add(routers_of(self.policy.model), batch)
            measured.add(batch, logprobs, entropies, weighted=weighted)
            return logprobs

        return share.gather(self.layout, self.device, compute)

    @property
    def _recomputes(self) -> bool:
        """Whether all trained tokens are computed before the first update."""
        return self.config.proximal == "recomputed" or needs_selection(self.config)

    def _before_updates(self, share: Share, measured: Measured) -> tuple[Tensor | None, Selection]:
        """Computes ``[places]`` logprobs under the policy that the step starts from, if needed, and the selection."""
        config = self.config
        if not self._recomputes:
            return None, Selection()
        started = self._measure(share, measured)
        if not needs_selection(config):
            return started, Selection()
        behavior, advantages = (self._column(share, name) for name in ("behavior", "advantages"))
        trained = share.gather(self.layout, self.device, lambda batch: torch.ones_like(batch.columns["behavior"])) > 0
        return started, select_tokens(config, started, behavior, advantages, trained, share.version)

    def _column(self, share: Share, name: str) -> Tensor:
        return share.gather(self.layout, self.device, lambda batch: batch.columns[name])

    def _loss(
        self, batch: MicroBatch, share: Share, proximal: Tensor | None, selection: Selection, sums: TokenSums,
        measured: Measured | None,
    ) -> Tensor:  # fmt: skip
        """Computes one micro-batch's part of the loss; ``measured`` is ``None`` after the first update."""
        config = self.config
        kept, penalized = selection.kept, selection.penalized
        reference: Tensor | None = None
        if self.reference is not None and config.kl_in == "loss":
            with torch.no_grad():
                reference, _ = self.reference(batch)
        computed, own = () if self._by_token else self.policy(batch), batch
        if computed and isinstance(batch, SharedBatch):
            batch, found = batch.whole_sequences(*computed, *(() if reference is None else (reference,)))
            computed, reference = found[:2], found[2] if reference is not None else None
        columns = batch.columns

        def loss_of(chosen: Tensor, logprobs: Tensor, entropies: Tensor) -> Tensor:
            places, behavior, versions = batch.places[chosen], columns["behavior"][chosen], columns["versions"][chosen]
            recomputed = None if proximal is None else proximal[places]
            tokens = LossTokens(
                logprobs=logprobs,
                entropies=entropies,
                behavior=behavior,
                proximal=proximal_logprobs(config, logprobs, behavior, versions, share.version, recomputed),
                reference=None if reference is None else reference[chosen],
                teacher=columns["teacher"][chosen] if "teacher" in columns else None,
                advantages=columns["advantages"][chosen],
                versions=versions,
                mask=torch.ones_like(places, dtype=torch.bool) if kept is None else kept[places],
                sequences=columns["sequences"][chosen],
                turns=columns["turns"][chosen],
                version=share.version,
                config=config,
                penalized=None if penalized is None else penalized[places],
            )
            losses = token_losses(tokens, self.objective)
            total = (losses.total * columns["weights"][chosen]).sum()
            with torch.no_grad():
                deviations = (tokens.ratio - 1).abs()
            sums.add(
                loss=total,
                clipped=losses.acted.sum(),
                correction=losses.correction.sum(),
                update_ratio=deviations.sum(),
                tokens=deviations.new_tensor(len(deviations)),
                **{name: part.sum() for name, part in losses.parts().items()},
            )
            sums.see(deviations, batch.targets[batch.trained[chosen]])
            if measured is not None:
                measured.add(batch, logprobs, entropies, chosen=chosen)
            return total + logprobs.sum() * 0  # requires grad even if the objective ignores the logprobs

        if self._by_token:
            total = self.policy(batch, loss_of)
        else:
            total = loss_of(torch.arange(len(batch.trained), device=self.device), *computed)
        if measured is not None:
            self._routing.add(routers_of(self.policy.model), batch)
        return total / share.normalizer + self._balance(own, share, sums)

    def _balance(self, batch: MicroBatch, share: Share, sums: TokenSums) -> Tensor | float:
        """Returns a micro-batch's part of the routers' load-balancing loss; of a shared one, that of this rank."""
        found = self.policy.take_router_loss()
        if found is None:
            return 0.0
        part = found * share_of_tokens(batch, share.row_tokens)
        sums.add(router_loss=part)
        return self.config.router_aux_loss * part

    @torch.no_grad()
    def _update_reference(self, version: int) -> None:
        """Updates a reference that is not frozen; ``version`` is the policy's version after the step."""
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
        """Clips gradients and steps the optimizer; without gradients, or with a non-finite norm, parameters stay."""
        if not any_gradient:
            return {"train/skipped": 1.0}
        norm = apply_gradients(self.optimizer, self.config.max_grad_norm)
        return {"train/grad_norm": norm} if math.isfinite(norm) else {"train/skipped": 1.0, "train/nonfinite": 1.0}


def _mean_over_updates(applied: Sequence[dict[str, float]]) -> dict[str, float]:
    """Averages over a step's updates; the gradient norm is that of the updates that were made, absent without one."""
    found = {key: sum(one.get(key, 0.0) for one in applied) / len(applied) for key in _FRACTIONS_OF_UPDATES}
    norms = [one["train/grad_norm"] for one in applied if "train/grad_norm" in one]
    return found | ({"train/grad_norm": sum(norms) / len(norms)} if norms else {})
