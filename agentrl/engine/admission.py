"""Chooses the prompts, and how many of their tokens, that are prefilled before the next decode step.

Guarantees: running requests wait for a bounded number of tokens; a long prompt is computed in parts, makes progress
with each part, and keeps its place in the queue. Runs in the loop thread.
"""

from collections.abc import Sequence

from agentrl.engine.make_runner import Runner
from agentrl.engine.request import Request
from agentrl.engine.scheduler import Scheduler

PREFILLS_PER_STEP = 32  # most prompts between two decode steps: running requests wait for them
PREFILL_TOKENS_PER_STEP = 1024  # most computed tokens of those prompts
CHUNK = 512  # default number of tokens of a longer prompt that are computed between two decode steps


class Admission:
    """Takes requests from the queue for the next prefill.

    Args:
        scheduler: Slots and queue.
        chunk: Tokens of a long prompt that are computed at a time.
    """

    def __init__(self, scheduler: Scheduler, chunk: int = CHUNK) -> None:
        """Start with no partly computed prompt."""
        self.chunk = chunk
        self._scheduler = scheduler
        self._part_of: tuple[Request | None, int] = (None, 0)  # the long prompt at the head, and what was left of it

    def next(self, runner: Runner) -> tuple[list[list[Request]], list[Request]]:
        """Chooses groups to prefill in one forward pass, or one group that is too long for one pass.

        A group with prompt logprobs comes alone. A group that is too long stays in the queue: compute a part of it.

        Args:
            runner: Runner with the prefix cache, which holds leading tokens of prompts.
        """
        groups: list[list[Request]] = []
        taken: list[Request] = []
        tokens = 0
        while len(groups) < PREFILLS_PER_STEP and tokens < PREFILL_TOKENS_PER_STEP:
            group = self._scheduler.next_group(taken=taken, plain_only=bool(groups))
            if not group:
                break
            new = len(group[0].prefix) - runner.kept.shared(group[0].prefix)
            if new > self.chunk and plain(group) and self._parts_pay(group[0], new, runner.kept.capacity):
                self._scheduler.put_back(group)
                return (groups, []) if groups else ([], group)
            groups.append(group)
            taken += group
            tokens += new
            if not plain(group):
                break
        return groups, []

    def _parts_pay(self, request: Request, new: int, capacity: int) -> bool:
        """Whether to compute a long prompt in parts: it must fit into the prefix cache and have made progress."""
        before, self._part_of = self._part_of, (request, new)
        if before[0] is request and new >= before[1]:
            return False
        return len(request.prefix) <= capacity


def plain(group: Sequence[Request]) -> bool:
    """Whether no request of the group wants prompt logprobs."""
    return not any(request.needs_prompt_logprobs for request in group)
