"""Computes the shares of groups that were solved by all of their episodes, and by none.

Guarantees: failed episodes do not count; a group of which nothing says whether it was solved does not count, and
without any other group there is no share.
"""

from collections.abc import Iterable, Sequence

from agentrl.core.episode import EpisodeBase

SUCCESS = "accuracy"  # the metric that says whether an episode solved its task, from 1 on


def solve_shares(groups: Iterable[Sequence[EpisodeBase]]) -> dict[str, float]:
    """Computes ``rollout/solve_all`` and ``rollout/solve_none``, shares of the groups that tell.

    An episode has solved its task if its ``accuracy`` is 1, or, where it has no such metric, if its reward is 1 and not
    0; other rewards do not tell.

    Args:
        groups: Episodes of each group.
    """
    told = [found for group in groups if (found := [one for one in map(_solved, group) if one is not None])]
    if not told:
        return {}
    return {
        "rollout/solve_all": sum(all(group) for group in told) / len(told),
        "rollout/solve_none": sum(not any(group) for group in told) / len(told),
    }


def _solved(episode: EpisodeBase) -> bool | None:
    """Whether an episode solved its task; ``None`` if it failed, or if nothing tells."""
    if episode.failed:
        return None
    if SUCCESS in episode.metrics:
        return episode.metrics[SUCCESS] >= 1
    return bool(episode.reward) if episode.reward in (0.0, 1.0) else None
