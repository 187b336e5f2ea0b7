"""Computes the prompts of the groups that admission chose, each once, whatever the number of its samples.

Guarantees: a group whose requests want logprobs of their prompt is computed alone, from the earliest token that one of
them wants. Runs in the loop thread.
"""

from collections.abc import Sequence

from torch import Tensor

from agentrl.engine.admission import plain
from agentrl.engine.make_runner import Runner
from agentrl.engine.request import Request


def compute_prompts(runner: Runner, groups: Sequence[Sequence[Request]], slots: Sequence[range]) -> Tensor:
    """Prefills groups, and sets the prompt logprobs of requests that want them.

    Args:
        runner: Runner whose cache takes the prompts.
        groups: Requests of equal prompts and images; one group where prompt logprobs are wanted.
        slots: The slots of each group's members.

    Returns:
        Logits ``[groups, vocabulary]`` behind each prompt.
    """
    if not plain(groups[0]):
        return _scored(runner, groups[0], slots[0])
    shown = [group[0].images for group in groups]
    how = {"images": shown} if any(shown) else {}  # only a runner of a model that takes images gets any
    return runner.prefill([group[0].prefix for group in groups], slots, **how)


def _scored(runner: Runner, group: Sequence[Request], slots: range) -> Tensor:
    """Prefills a group in which at least one request wants prompt logprobs, and sets those logprobs."""
    starts = [request.logprob_start for request in group if request.needs_prompt_logprobs]
    score_from = min(starts, default=len(group[0].prefix))
    how = {"images": group[0].images} if group[0].images else {}
    logits, scores = runner.prefill_scored(group[0].prefix, slots, score_from, **how)
    for request in group:
        if request.needs_prompt_logprobs:
            start = max(request.logprob_start, 1)
            skip = start - max(score_from, 1)
            request.input_logprobs = scores[skip : skip + max(0, len(request.prompt) - start)]
    return logits
