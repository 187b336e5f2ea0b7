"""Adds a teacher's logprobs to the tokens that the policy sampled.

Guarantees: the teacher scores exactly the ids that the policy saw and sampled; an episode that it cannot score fails
with the reason, and is never returned without teacher logprobs; a sampled token shared by several branches is scored
once.
"""

import asyncio
from collections.abc import Sequence

from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.core.images import images_of
from agentrl.inference.backend import Backend, InferenceError
from agentrl.inference.router import Lease, Router


class Teacher:
    """The servers of one teacher.

    Args:
        router: Router of these servers. A server that recovers gets traffic at once: its weights never change.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        router.rejoin = self._take_back

    async def start(self) -> None:
        """Check that every server can score, then start the router's health checks.

        Raises:
            InferenceError: A server cannot score; the message names it.
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
        """Returns the episode with ``teacher_logprobs``, or as failed if the teacher could not score it.

        An episode that failed before is returned unchanged.
        """
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
    """Returns the trajectory with the teacher's logprobs of all sampled tokens; one request per branch.

    Raises:
        InferenceError: The teacher could not score a branch.
    """
    nodes = list(trajectory.nodes)
    if any(images_of(node.message) for node in nodes):
        raise InferenceError("a teacher scores token ids alone, and the messages hold images")
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        while path and not any(nodes[path[-1]].loss_mask):
            path.pop()  # after the last sampled message there may be a prompt that does not fit the context
        start, token_ids = 0, []
        starts: dict[int, int] = {}  # node to score -> position of its first token in the branch
        for index in path:
            if any(nodes[index].loss_mask) and not nodes[index].teacher_logprobs:
                starts[index] = len(token_ids)
            token_ids += nodes[index].token_ids
        if not starts:
            continue
        start = max(min(starts.values()), 1)  # the first token has no logprob: no token precedes it
        logprobs = [0.0] * start + await lease.score(token_ids, start)
        for index, first in starts.items():
            nodes[index] = _scored(nodes[index], logprobs[first : first + len(nodes[index].token_ids)])
    return trajectory.model_copy(update={"nodes": nodes})


def _scored(node: Node, logprobs: Sequence[float]) -> Node:
    kept = [value if sampled else 0.0 for value, sampled in zip(logprobs, node.loss_mask, strict=True)]
    return node.model_copy(update={"teacher_logprobs": kept})
