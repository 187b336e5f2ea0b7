"""From a batch of episodes to sequences with advantages.

Guarantees: failed episodes give nothing; advantages are per (group id, role); the token count that the loss is divided
by covers the whole global batch, also the sequences whose advantage is 0 and which therefore need no computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.recipe import RewardScale
from agentrl.core.episode import Episode
from agentrl.train.advantages import group_advantages
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


def make_train_batch(episodes: Sequence[Episode], *, scale: RewardScale, keep_zero: bool) -> TrainBatch:
    """Advantages for every role of every episode, and their sequences.

    Args:
        episodes: Of whole groups.
        scale: See :func:`~agentrl.train.advantages.group_advantages`.
        keep_zero: Keep sequences with advantage 0 (needed where the loss has other terms, as a KL).
    """
    entries = [
        (episode.reward, (episode.group_id, role), trajectory)
        for episode in episodes
        if not episode.failed and episode.reward is not None
        for role, trajectory in episode.trajectories.items()
    ]
    advantages = group_advantages([e[0] for e in entries], [e[1] for e in entries], scale=scale)
    sequences = [
        TrainSequence(
            token_ids=flat.token_ids,
            loss_mask=flat.loss_mask,
            logprobs=flat.logprobs,
            advantage=advantage,
        )
        for (_, _, trajectory), advantage in zip(entries, advantages, strict=True)
        for flat in trajectory.sequences()
    ]
    loss_tokens = sum(sum(s.loss_mask) for s in sequences)
    useful = [s for s in sequences if s.advantage != 0]
    return TrainBatch(
        sequences=sequences if keep_zero else useful,
        loss_tokens=max(loss_tokens, 1),
        signal=len(useful) / max(len(sequences), 1),
    )
