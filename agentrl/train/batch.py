"""From a batch of episodes to sequences with advantages.

Guarantees: failed episodes give nothing; advantages are per (group id, role); the token count that the loss is divided
by covers the whole global batch, also the sequences whose advantage is 0 and which therefore need no computation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.core.episode import Episode, StopReason, Trajectory
from agentrl.core.registry import load
from agentrl.train.advantages import Advantage, Scored
from agentrl.train.objective import skips_zero_advantages
from agentrl.train.packing import TrainSequence


@dataclass(frozen=True)
class TrainBatch:
    """What one trainer step works on.

    Attributes:
        sequences: Those that carry gradient.
        loss_tokens: Trained tokens of the global batch: the denominator of the loss.
        signal: Share of the sequences whose advantage is not 0.
    """

    sequences: list[TrainSequence]
    loss_tokens: int
    signal: float


def make_train_batch(
    episodes: Sequence[Episode], config: TrainerConfig, rewards: RewardConfig | None = None
) -> TrainBatch:
    """Advantages for every role of every episode, and their sequences.

    Args:
        episodes: Of whole groups.
        config: Names the advantage. Sequences with advantage 0 are kept where the loss needs them (KL, entropy, some
            objectives).
        rewards: How rewards are seen.

    Raises:
        ValueError: The advantage function gave something else than one finite number for each entry.
    """
    advantage: Advantage = load("advantage", config.advantage)
    seen = rewards or RewardConfig()
    entries = [
        (_score(episode, role, trajectory, seen.seen(episode.reward)), trajectory)
        for episode in episodes
        if not episode.failed and episode.reward is not None
        for role, trajectory in episode.trajectories.items()
    ]
    advantages = advantage([scored for scored, _ in entries], config)
    if len(advantages) != len(entries):
        raise ValueError(
            f"trainer.advantage={config.advantage} gave {len(advantages)} values for {len(entries)} entries"
        )  # fmt: skip
    broken = [value for value in advantages if not math.isfinite(value)]
    if broken:
        raise ValueError(f"trainer.advantage={config.advantage} gave {broken[0]!r}; want finite numbers")
    sequences = [
        TrainSequence(
            token_ids=flat.token_ids,
            loss_mask=flat.loss_mask,
            logprobs=flat.logprobs,
            advantage=float(value),
        )
        for (_, trajectory), value in zip(entries, advantages, strict=True)
        for flat in trajectory.sequences()
    ]
    loss_tokens = sum(sum(s.loss_mask) for s in sequences)
    useful = [s for s in sequences if s.advantage != 0]
    return TrainBatch(
        sequences=useful if skips_zero_advantages(config) else sequences,
        loss_tokens=max(loss_tokens, 1),
        signal=len(useful) / max(len(sequences), 1),
    )


def _score(episode: Episode, role: str, trajectory: Trajectory, reward: float) -> Scored:
    return Scored(
        group=(episode.group_id, role),
        reward=reward,
        step_rewards=tuple(node.reward for node in trajectory.nodes if any(node.loss_mask)),
        terminated=episode.stop_reason is StopReason.TERMINATED,
    )
