"""The policy versions that sampled the tokens of an evaluation.

Guarantees: an evaluation whose tokens are all of the version that it is of has no such metric; any other has both, and
the episodes' own tokens say them.
"""

from collections.abc import Iterable

from agentrl.core.episode import NOT_SAMPLED, Episode


def version_metrics(episodes: Iterable[Episode], evaluated: int) -> dict[str, float]:
    """Returns ``eval/version_min`` and ``eval/version_max`` over all sampled tokens of the episodes that did not fail.

    Args:
        episodes: Episodes of one evaluation.
        evaluated: Version that the evaluation is of.
    """
    seen = {version for episode in episodes if not episode.failed for version in versions_of_episode(episode)}
    if seen <= {evaluated}:
        return {}
    return {"eval/version_min": float(min(seen)), "eval/version_max": float(max(seen))}


def versions_of_episode(episode: Episode) -> set[int]:
    """Returns the versions that sampled an episode's tokens; empty where the server reports no tokens."""
    nodes = (node for trajectory in episode.trajectories.values() for node in trajectory.nodes)
    return {version for node in nodes for version in node.versions} - {NOT_SAMPLED}
