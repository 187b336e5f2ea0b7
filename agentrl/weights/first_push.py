"""Checks that a push of unchanged weights leaves what a server computes as it was.

Names that a server does not know it may ignore in silence, and parts that are in another order it loads as they come:
the first push of a run is therefore of the weights that the servers were started with, and shows both before an update
is made. What a server would ignore the trainer finds (:func:`agentrl.weights.file_names.wrong_names`); what it would
load wrongly changes the logprobs of a fixed text.
"""

import asyncio
from collections.abc import Mapping, Sequence
from statistics import fmean

from agentrl.inference.backend import Backend, ServerUnreachable
from agentrl.inference.router import Router

TEXT = "The first push to a server changes nothing: it is of the weights that the server has loaded by itself."
TOLERANCE = 0.15  # mean difference in nats; rounding of bfloat16 gives 0.05 at most, a wrong layer several nats


async def scores(router: Router, servers: Sequence[Backend], token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Returns the logprobs of a text by each server's URL; a server that does not answer has none.

    Args:
        router: Router of the servers; it ends the call to one that it takes out.
        servers: Servers to ask.
        token_ids: Ids of the text.

    Raises:
        InferenceError: A server refuses.
    """
    asked = (router.ask(one, lambda server: server.score(list(token_ids), 1)) for one in servers)
    found = await asyncio.gather(*asked, return_exceptions=True)
    answered: dict[str, list[float]] = {}
    for server, outcome in zip(servers, found, strict=True):
        if isinstance(outcome, ServerUnreachable):
            continue
        if isinstance(outcome, BaseException):
            raise outcome
        answered[server.url] = outcome
    return answered


def changed(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> str | None:
    """Returns which servers compute something else than before; ``None`` if none does."""
    gaps = {
        url: fmean(abs(one - other) for one, other in zip(before[url], values, strict=True))
        for url, values in after.items()
        if url in before
    }
    wrong = [f"{url} (by {gap:.2g} nats on average)" for url, gap in gaps.items() if not gap <= TOLERANCE]
    return ", ".join(wrong) or None
