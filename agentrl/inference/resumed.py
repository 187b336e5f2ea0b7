"""Ends an answer that was sampled in pieces at a stop text, as a server does with one that it samples in one piece.

Guarantees: a stop text is found wherever it lies, also across two pieces, of which a server sees one at a time; the
answer's last token is the first one with which the text is complete.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.inference.backend import Generation


def stopped_at_text(
    answer: Generation, stops: Sequence[str], known: int, text: Callable[[list[int]], str]
) -> Generation:
    """Returns the answer up to its first stop text, or unchanged if it holds none.

    Args:
        answer: All that was sampled so far.
        stops: Texts that end an answer.
        known: Number of tokens at its beginning that hold no stop text.
        text: Function that decodes ids.
    """

    def is_complete(count: int) -> bool:
        said = text(answer.token_ids[:count])
        return any(stop in said for stop in stops)

    whole = len(answer.token_ids)
    if not stops or not is_complete(whole):
        return answer
    end = bisect_left(range(known, whole), True, key=is_complete) + known
    return replace(
        answer,
        token_ids=answer.token_ids[:end],
        logprobs=answer.logprobs[:end],
        versions=answer.versions[:end],
        finish_reason="stop",
    )
