"""Turns the columns of a batch into the input of an update: advantages, token weights, branches that carry gradient.

Guarantees: failed episodes are left out; an advantage compares rewards of one role in one group, or what
``trainer.baseline`` names; a role's reward is its own where it has one, else the episode's; the loss's normalizer
counts the whole global batch, also tokens that are not computed because their advantage is 0. A fork does not raise an
episode's weight: its branches share it. Only rank 0 does this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agentrl.config.baseline import baseline_key
from agentrl.config.declarations import takes_token_penalties
from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.ending import trajectory_ends
from agentrl.core.registry import load
from agentrl.train.advantages import Advantage, token_credit, whitened
from agentrl.train.branches import Branch, TokenColumns, branches_of
from agentrl.train.loss import normalizer, skips_zero_advantages, token_weight
from agentrl.train.returns import Scored, Turn
from agentrl.train.stale_tokens import fresh_tokens, masked, with_loss
from agentrl.train.turn_order import TurnOrder

Floats = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """The input of one trainer step.

    Attributes:
        branches: Branches that carry gradient.
        tokens: Tokens of the batch with their advantages.
        normalizer: Divisor of the loss's weighted sum over tokens; counts the whole global batch.
        signal: Fraction of the branches that have a nonzero advantage.
        version: Policy version that the step starts from.
        valued: Branches that the critic learns from; empty without a critic.
        idle: The other branches that the loss counts: all their tokens have a zero advantage and no gradient.
    """

    branches: list[Branch]
    tokens: TokenColumns
    normalizer: float
    signal: float
    version: int = 0
    valued: list[Branch] = field(default_factory=list)
    idle: list[Branch] = field(default_factory=list)


class Batch:
    """A batch of episodes before its advantages are computed.

    Args:
        columns: Episodes of whole groups.
        config: The recipe's trainer section.
        rewards: The recipe's reward section, which clips and scales rewards.
    """

    def __init__(self, columns: Columns, config: TrainerConfig, rewards: RewardConfig | None = None) -> None:
        self._columns = columns
        self._config = config
        self._rewards = rewards or RewardConfig()
        self._ranges = list(columns.trajectories())
        self._usable = [not columns.episodes[found.episode].failed for found in self._ranges]
        self.tokens = TokenColumns.of(columns)
        self.branches = [branch for branch in branches_of(columns) if self._usable[branch.trajectory]]
        self._cut, ends = trajectory_ends(columns)
        self._cut_ends = self._bootstrapped(ends)  # number of the branch -> its last sampled message

    def _bootstrapped(self, ends: Sequence[Sequence[int]]) -> dict[int, int]:
        """Returns the message after which each branch that was cut has a bootstrap value.

        Args:
            ends: Last answers of each trajectory; after one without tokens, the turn before it counts.
        """
        counts, parents = np.diff(self.tokens.sampled_starts), self._columns.parents
        last: set[int] = set()
        for cut, found, answers in zip(self._cut, self._ranges, ends, strict=True):
            for message in answers if cut else ():
                while not counts[message] and parents[message] >= 0:
                    message = found.first + int(parents[message])
                last.add(message)
        trained = {
            branch.number: [message for message, own in zip(branch.messages, branch.trained, strict=True) if own]
            for branch in self.branches
        }
        return {number: own[-1] for number, own in trained.items() if own[-1] in last}

    def asked_values(self) -> list[Branch]:
        """Returns the branches whose trained tokens need values of the critic.

        A branch that ends where its trajectory was cut ends with that message, and has one more position after it, for
        the bootstrap value.
        """
        return [self._asked(branch) for branch in self.branches]

    def train_batch(
        self,
        *,
        version: int = 0,
        penalties: Floats | None = None,
        values: Floats | None = None,
        oldest: int | None = None,
    ) -> TrainBatch:
        """Computes the advantages of every role of every episode.

        Branches whose advantages are all 0 are kept if the loss needs them (KL, entropy, some objectives). With
        ``mask_truncated`` the roles that were cut (:mod:`agentrl.core.ending`) count only in their group's baseline.

        Args:
            version: Policy version that the step starts from.
            penalties: ``[sampled]`` KL penalty of each token, subtracted from its own reward if the advantage function
                takes token penalties, else from its episode's reward.
            values: ``[sampled + branches]`` the critic's value before each sampled token, then the bootstrap value of
                each branch that :meth:`asked_values` gave a position for one.
            oldest: Oldest policy version whose tokens carry a loss (:mod:`agentrl.train.stale_tokens`); ``None`` for
                all tokens.

        Raises:
            ValueError: The advantage function did not give finite numbers for each entry, or a sampled message has no
                teacher logprobs.
        """
        config, entries = self._config, self._entries(penalties, values)
        advantages = np.zeros(self.tokens.total)
        for (number, _), credit in zip(entries, self._credits(entries), strict=True):
            advantages[self._sampled(number)] = credit
        plain = advantages.copy() if values is not None else advantages
        kept = [number for number, one in entries if not (config.mask_truncated and not one.terminated)]
        fresh = fresh_tokens(self._columns.versions, oldest)
        chosen = np.zeros(self.tokens.total, bool)
        for number in kept:
            chosen[self._sampled(number)] = fresh[self._sampled(number)]
        if config.distill_coef > 0:
            advantages = advantages - config.distill_coef * self._teacher_gaps(kept)
        if config.whiten == "batch":
            advantages[chosen] = whitened(advantages[chosen])
        counts = {number: int(fresh[self._sampled(number)].sum()) for number, _ in entries}
        among = set(kept)
        branches = [
            replace(branch, weight=token_weight(counts[branch.trajectory], config))
            for branch in with_loss(self.branches, self.tokens, fresh)
            if branch.trajectory in among
        ]
        sampled = self.tokens.sampled | {"advantages": advantages.astype(np.float32)}
        if values is not None:
            sampled["values"] = values[: self.tokens.total].astype(np.float32)
            sampled["returns"] = (sampled["values"] + plain).astype(np.float32)
        with_signal = np.where(fresh, advantages, 0.0)
        signals = [self._any(with_signal, branch) for branch in branches]
        useful = [branch for branch, signal in zip(branches, signals, strict=True) if signal]
        idle = [branch for branch, signal in zip(branches, signals, strict=True) if not signal]
        skips = skips_zero_advantages(config)
        return TrainBatch(
            branches=useful if skips else branches,
            tokens=masked(replace(self.tokens, sampled=sampled), fresh),
            normalizer=normalizer([counts[number] for number in kept], config),
            signal=len(useful) / max(len(branches), 1),
            version=version,
            valued=[] if values is None else branches,
            idle=idle if skips else [],
        )

    def _asked(self, branch: Branch) -> Branch:
        end = self._cut_ends.get(branch.number)
        if end is None:
            return branch
        count = branch.messages.index(end) + 1  # a prompt that did not fit may follow
        return replace(
            branch,
            messages=branch.messages[:count],
            trained=branch.trained[:count],
            bootstrap=self.tokens.total + branch.number,
        )

    def _sampled(self, trajectory: int) -> slice:
        found, starts = self._ranges[trajectory], self.tokens.sampled_starts
        return slice(int(starts[found.first]), int(starts[found.end]))

    def _any(self, values: Floats, branch: Branch) -> bool:
        starts = self.tokens.sampled_starts
        own = [message for message, trained in zip(branch.messages, branch.trained, strict=True) if trained]
        return any(values[starts[message] : starts[message + 1]].any() for message in own)

    def _entries(self, penalties: Floats | None, values: Floats | None) -> list[tuple[int, Scored]]:
        """Returns the number of each usable trajectory with its rewards and turns."""
        found: list[tuple[int, Scored]] = []
        bootstraps = self._bootstraps(values)
        own = penalties if takes_token_penalties(self._config.advantage) else None
        for number, trajectory in enumerate(self._ranges):
            if not self._usable[number]:
                continue
            record = self._columns.episodes[trajectory.episode]
            reward = self._rewards.seen(record.reward_of(trajectory.role))
            if penalties is not None and own is None:
                reward -= float(penalties[self._sampled(number)].sum())
            turns = tuple(self._turns(number, values, bootstraps, own))
            key = baseline_key(record, trajectory.role, self._config.baseline)
            found.append((number, Scored(key, reward, turns, terminated=not self._cut[number])))
        return found

    def _bootstraps(self, values: Floats | None) -> dict[int, float]:
        """Returns the critic's value after each message with which a trajectory was cut."""
        if values is None:
            return {}
        return {message: float(values[self.tokens.total + number]) for number, message in self._cut_ends.items()}

    def _turns(
        self, trajectory: int, values: Floats | None, bootstraps: dict[int, float], penalties: Floats | None
    ) -> Iterator[Turn]:
        starts, found = self.tokens.sampled_starts, self._ranges[trajectory]
        own = slice(found.first, found.end)
        columns = self._columns
        order = TurnOrder.of(
            columns.parents[own], self.tokens.turns[own] >= 0, found.first, follows=columns.follows[own]
        )
        for message, parent, root in zip(order.messages, order.parents, order.roots, strict=True):
            first, end = int(starts[message]), int(starts[message + 1])
            reward = float(columns.rewards[message])
            yield Turn(
                parent=parent,
                tokens=end - first,
                reward=None if np.isnan(reward) else self._rewards.scale * reward,
                values=() if values is None else tuple(values[first:end].tolist()),
                after=bootstraps.get(message, 0.0),
                root=root,
                penalties=() if penalties is None else tuple(penalties[first:end].tolist()),
            )

    def _credits(self, entries: Sequence[tuple[int, Scored]]) -> list[Floats]:
        name = self._config.advantage
        advantage: Advantage = load("advantage", name)
        scored = [one for _, one in entries]
        credits = list(advantage(scored, self._config))
        if len(credits) != len(scored):
            raise ValueError(f"trainer.advantage={name} gave {len(credits)} values for {len(scored)} entries")
        try:
            return [token_credit(credit, one) for credit, one in zip(credits, scored, strict=True)]
        except ValueError as error:
            raise ValueError(f"trainer.advantage={name} gave {error}") from None

    def _teacher_gaps(self, trajectories: Sequence[int]) -> Floats:
        """Returns ``[sampled]`` behavior minus teacher logprobs: one-sample estimates of the reverse KL to the teacher.

        The gradient of each token's KL, ignoring its effect on later tokens, is a policy gradient whose advantage is
        the negative gap. Lu and Thinking Machines Lab 2025, On-Policy Distillation; Agarwal et al. 2024 (GKD),
        arXiv:2306.13649.
        """
        columns, counts = self._columns, np.diff(self.tokens.sampled_starts)
        for number in trajectories:
            found = self._ranges[number]
            own = slice(found.first, found.end)
            if not columns.scored[own][counts[own] > 0].all():
                raise ValueError("a sampled message has no teacher_logprobs")
        if not len(columns.teacher_logprobs):
            return np.zeros(self.tokens.total)
        return columns.logprobs.astype(np.float64) - columns.teacher_logprobs
