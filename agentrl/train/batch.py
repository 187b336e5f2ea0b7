"""From a batch of episodes to sequences with advantages and weights.

Guarantees: failed episodes give nothing; advantages are per (group id, role); what the loss is divided by covers the
whole global batch, also the sequences whose advantage is 0 and which therefore need no computation. An episode's
branches share its weight: forks do not raise it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.core.episode import Episode, StopReason, Trajectory
from agentrl.core.episode import Sequence as FlatSequence
from agentrl.core.registry import load
from agentrl.train.advantages import Advantage, Scored, whitened
from agentrl.train.objective import skips_zero_advantages
from agentrl.train.packing import TrainSequence


@dataclass(frozen=True)
class TrainBatch:
    """What one trainer step works on.

    Attributes:
        sequences: Those that carry gradient.
        normalizer: The loss is the weighted sum over tokens divided by this; counts the whole global batch.
        signal: Share of the sequences whose advantage is not 0.
        version: Policy version that the step starts from.
    """

    sequences: list[TrainSequence]
    normalizer: float
    signal: float
    version: int = 0


Penalty = Callable[[Sequence[TrainSequence]], Sequence[float]]


@dataclass(frozen=True)
class _Entry:
    """One role of one episode."""

    scored: Scored
    branches: list[FlatSequence]

    @property
    def tokens(self) -> int:
        return sum(sum(branch.loss_mask) for branch in self.branches)


def make_train_batch(
    episodes: Sequence[Episode],
    config: TrainerConfig,
    rewards: RewardConfig | None = None,
    *,
    version: int = 0,
    penalty: Penalty | None = None,
) -> TrainBatch:
    """Advantages for every role of every episode, and their sequences.

    Args:
        episodes: Of whole groups.
        config: Names the advantage. Sequences with advantage 0 are kept where the loss needs them (KL, entropy, some
            objectives). With ``mask_truncated`` an episode that was cut off counts in its group's baseline only.
        rewards: How rewards are seen.
        version: Policy version that the step starts from.
        penalty: Gives what is taken off the reward for each of some sequences (KL in the reward).

    Raises:
        ValueError: The advantage function gave something else than one finite number for each entry.
    """
    seen = rewards or RewardConfig()
    entries = [
        _Entry(_score(episode, role, trajectory, seen.seen(episode.reward)), trajectory.sequences())
        for episode in episodes
        if not episode.failed and episode.reward is not None
        for role, trajectory in episode.trajectories.items()
    ]
    if penalty is not None:
        entries = _penalised(entries, penalty)
    advantages = _advantages([entry.scored for entry in entries], config)
    kept = [
        (entry, value)
        for entry, value in zip(entries, advantages, strict=True)
        if not (config.mask_truncated and not entry.scored.terminated)
    ]
    if config.whiten == "batch":
        values = whitened([value for _, value in kept], [entry.tokens for entry, _ in kept])
        kept = [(entry, value) for (entry, _), value in zip(kept, values, strict=True)]
    groups = {entry.scored.group[0]: number for number, entry in enumerate(entries)}
    sequences = [
        TrainSequence(
            token_ids=flat.token_ids,
            loss_mask=flat.loss_mask,
            logprobs=flat.logprobs,
            advantage=float(value),
            weight=1.0 / entry.tokens if config.aggregation == "sequence" else 1.0,
            versions=flat.versions,
            group=groups[entry.scored.group[0]],
        )
        for entry, value in kept
        for flat in entry.branches
    ]
    useful = [s for s in sequences if s.advantage != 0]
    return TrainBatch(
        sequences=useful if skips_zero_advantages(config) else sequences,
        normalizer=_normalizer([entry for entry, _ in kept], config),
        signal=len(useful) / max(len(sequences), 1),
        version=version,
    )


def _advantages(scored: Sequence[Scored], config: TrainerConfig) -> list[float]:
    advantage: Advantage = load("advantage", config.advantage)
    values = list(advantage(scored, config))
    if len(values) != len(scored):
        raise ValueError(f"trainer.advantage={config.advantage} gave {len(values)} values for {len(scored)} entries")
    broken = [value for value in values if not math.isfinite(value)]
    if broken:
        raise ValueError(f"trainer.advantage={config.advantage} gave {broken[0]!r}; want finite numbers")
    return values


def _penalised(entries: Sequence[_Entry], penalty: Penalty) -> list[_Entry]:
    """Entries whose rewards are lowered by the penalties of all their branches."""
    flat = [TrainSequence(b.token_ids, b.loss_mask, b.logprobs, 0.0) for entry in entries for b in entry.branches]
    values = iter(penalty(flat))
    return [
        replace(
            entry, scored=replace(entry.scored, reward=entry.scored.reward - sum(next(values) for _ in entry.branches))
        )
        for entry in entries
    ]


def _normalizer(entries: Sequence[_Entry], config: TrainerConfig) -> float:
    """What the weighted sum over tokens is divided by."""
    trained = [entry for entry in entries if entry.tokens]
    match config.aggregation:
        case "token":
            count = float(sum(entry.tokens for entry in trained))
        case "constant":
            count = float(len(trained) * (config.aggregation_length or 1))
        case _:  # sequence: the weights divide by each entry's length; sum: nothing does
            count = float(len(trained))
    return max(count, 1.0)


def _score(episode: Episode, role: str, trajectory: Trajectory, reward: float) -> Scored:
    return Scored(
        group=(episode.group_id, role),
        reward=reward,
        step_rewards=tuple(node.reward for node in trajectory.nodes if any(node.loss_mask)),
        terminated=episode.stop_reason is StopReason.TERMINATED,
    )
