"""A teacher that says how likely it finds what the policy sampled.

Guarantees: the teacher sees exactly the ids that the policy saw and sampled; an episode that it could not score is a
failure with its reason, never an episode without its say; a sampled token that several branches share is scored once.
"""

import asyncio
from collections.abc import Sequence

from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.inference.backend import Backend, InferenceError
from agentrl.inference.router import Lease, Router


class Teacher:
    """Servers of one teacher.

    Args:
        router: Their router; one that comes back gets traffic again, for its weights never change.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        router.rejoin = self._take_back

    async def start(self) -> None:
        """See that every server scores, then watch them.

        Raises:
            InferenceError: One does not; the message names it.
        """
        for backend in self._router.backends:
            try:
                await backend.score([0, 0], 1)
            except InferenceError as error:
                raise InferenceError(f"the teacher does not score: {error}") from error
        self._router.start()

    async def close(self) -> None:
        """Close the connections."""
        await self._router.close()

    async def _take_back(self, backend: Backend) -> None:
        self._router.admit(backend)

    async def score(self, episode: Episode) -> Episode:
        """The episode with ``teacher_logprobs``; failed where the teacher gave none, and as it is where it failed."""
        if episode.failed:
            return episode
        lease = self._router.lease()
        try:
            scored = await asyncio.gather(*(score_trajectory(t, lease) for t in episode.trajectories.values()))
        except InferenceError as error:
            failure = {"reward": None, "stop_reason": StopReason.INFERENCE_ERROR}
            return episode.model_copy(update={**failure, "error": f"the teacher did not score the episode: {error}"})
        finally:
            lease.release()
        return episode.model_copy(update={"trajectories": dict(zip(episode.trajectories, scored, strict=True))})


async def score_trajectory(trajectory: Trajectory, lease: Lease) -> Trajectory:
    """The trajectory with the teacher's logprobs of all sampled tokens; one request for each branch.

    Raises:
        InferenceError: The teacher gave none.
    """
    nodes = list(trajectory.nodes)
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        start, token_ids = 0, []
        starts: dict[int, int] = {}  # of the nodes of this branch that are to be scored
        for index in path:
            if any(nodes[index].loss_mask) and not nodes[index].teacher_logprobs:
                starts[index] = len(token_ids)
            token_ids += nodes[index].token_ids
        if not starts:
            continue
        start = max(min(starts.values()), 1)  # nothing comes before the first token: it has no logprob
        logprobs = [0.0] * start + await lease.score(token_ids, start)
        for index, first in starts.items():
            nodes[index] = _scored(nodes[index], logprobs[first : first + len(nodes[index].token_ids)])
    return trajectory.model_copy(update={"nodes": nodes})


def _scored(node: Node, logprobs: Sequence[float]) -> Node:
    kept = [value if sampled else 0.0 for value, sampled in zip(logprobs, node.loss_mask, strict=True)]
    return node.model_copy(update={"teacher_logprobs": kept})
