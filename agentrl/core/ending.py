"""Decides whether an episode was cut off before its own end, and where.

Guarantees: every part that treats cut episodes differently (masks, bootstrap values, metrics, the recorded stop reason)
asks this module, so they agree. The decision is made for each role:

- In an episode that a limit ended (:data:`LIMITS`: of the environment, the workflow, the context or the deadline),
  every role is cut.
- In any other, a role is cut if its last answer was: it has the finish reason ``length`` (``sampling.max_new_tokens``,
  or no room left in the context) or ``abort``. What the environment said of that answer, and its reward, stay.
- An earlier answer that was cut and that the role went on after does not count.
- Where the last prompt has several answers, the role is cut only if all of them are: their order means nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.core.columns import FINISH_REASONS, Columns
from agentrl.core.episode import Episode, StopReason, Trajectory
from agentrl.core.sent_episode import SentEpisode

LIMITS = frozenset({StopReason.TRUNCATED, StopReason.CONTEXT_OVERFLOW, StopReason.TIMEOUT})
"""Stop reasons of episodes that a limit ended, whatever the last answer was."""

CUT_ANSWERS = frozenset({"length", "abort"})
"""Finish reasons of answers that ended before the policy ended them."""

_CUT_CODES = [FINISH_REASONS.index(name) for name in sorted(CUT_ANSWERS)]

SUCCESS = "accuracy"
"""The metric that says whether an episode solved its task."""


def last_answers(parents: Sequence[int], sampled: Sequence[bool]) -> list[int]:
    """Returns the answers that a trajectory ends with.

    Args:
        parents: ``[messages]`` index of the previous message; -1 for a first message.
        sampled: ``[messages]`` whether the policy sampled the message.

    Returns:
        The latest sampled message and the other answers to the same prompt that no later answer follows; empty if
        nothing was sampled.
    """
    own = [index for index, one in enumerate(sampled) if one]
    if not own:
        return []
    followed: set[int] = set()
    for index in own:
        step = parents[index]
        while step >= 0 and step not in followed:
            followed.add(step)
            step = parents[step]
    return [index for index in own if parents[index] == parents[own[-1]] and index not in followed]


def role_cut(reason: StopReason, trajectory: Trajectory) -> bool:
    """Whether a role was cut in an episode that ended for ``reason``."""
    nodes = trajectory.nodes
    for latest in reversed(nodes):
        if latest.finish_reason is not None or any(latest.loss_mask):
            break
    else:
        return reason in LIMITS
    if latest.finish_reason not in CUT_ANSWERS:  # it is one of the last answers, and was not cut
        return reason in LIMITS
    last = last_answers(
        [-1 if node.parent is None else node.parent for node in nodes],
        [node.finish_reason is not None or any(node.loss_mask) for node in nodes],
    )
    return _cut(reason, [nodes[index].finish_reason for index in last])


def episode_cut(episode: Episode) -> bool:
    """Whether an episode was cut: any of its roles, or the episode before a role sampled."""
    if isinstance(episode, SentEpisode):
        return episode.cut  # decided by this function where the episode ran
    return episode.stop_reason in LIMITS or any(
        role_cut(episode.stop_reason, trajectory) for trajectory in episode.trajectories.values()
    )


def stop_reason(reason: StopReason, trajectories: dict[str, Trajectory]) -> StopReason:
    """Returns the stop reason to record: ``LENGTH`` if the environment ended the episode after a cut answer."""
    if reason is StopReason.TERMINATED and any(role_cut(reason, one) for one in trajectories.values()):
        return StopReason.LENGTH
    return reason


def trajectory_ends(columns: Columns) -> tuple[list[bool], list[list[int]]]:
    """Finds the ends of all trajectories of a batch.

    Returns:
        For each trajectory, in the order of :meth:`Columns.trajectories`, whether it was cut, and the indices of its
        last answers among all messages.
    """
    answers = (columns.sampled_counts() > 0) | (columns.finish != FINISH_REASONS.index(None))
    parents, sampled, finish = columns.parents.tolist(), answers.tolist(), columns.finish.tolist()  # at once: fast
    cut: list[bool] = []
    ends: list[list[int]] = []
    for found in columns.trajectories():
        own = slice(found.first, found.end)
        last = last_answers(parents[own], sampled[own])
        finishes = [FINISH_REASONS[finish[found.first + index]] for index in last]
        cut.append(_cut(columns.episodes[found.episode].stop_reason, finishes))
        ends.append([found.first + index for index in last])
    return cut, ends


def cut_episodes(columns: Columns) -> list[bool]:
    """Returns for each episode whether it was cut, as :func:`episode_cut` does."""
    cut = [record.stop_reason in LIMITS for record in columns.episodes]
    if not np.isin(columns.finish, _CUT_CODES).any():  # no answer was cut
        return cut
    for found, one in zip(columns.trajectories(), trajectory_ends(columns)[0], strict=True):
        cut[found.episode] |= one
    return cut


def counted_metrics(metrics: Sequence[Mapping[str, float]], cut: Sequence[bool]) -> list[dict[str, float]]:
    """Returns the metrics that each episode counts with.

    An episode that was cut before the environment could judge it solved nothing: it has :data:`SUCCESS` 0 if other
    episodes report this metric.

    Args:
        metrics: ``[episodes]`` the environment's metrics of the episodes that did not fail.
        cut: ``[episodes]`` whether each was cut.
    """
    graded = any(SUCCESS in found for found in metrics)
    unsolved = {SUCCESS: 0.0} if graded else {}
    return [(unsolved if one else {}) | dict(found) for found, one in zip(metrics, cut, strict=True)]


def _cut(reason: StopReason, last: Sequence[str | None]) -> bool:
    """Whether a limit ended the episode, or cut all of a role's last answers, given their finish reasons."""
    return reason in LIMITS or (bool(last) and all(finish in CUT_ANSWERS for finish in last))
