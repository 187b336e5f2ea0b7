"""The random numbers of an answer that a weight push aborted, on a real embedded engine."""

from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate

TOKENS = 12  # before the abort, and after it
ANSWERS = 24
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=2 * TOKENS, temperature=1e6), 500, locked=True, model="m")


class Aborting:
    """Cuts each answer after its first half, as a weight push with ``pause_mode=abort`` does."""

    def __init__(self, backend: EmbeddedBackend) -> None:
        self.backend = backend
        self.url = backend.url

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        if params.max_new_tokens <= TOKENS:
            return await self.backend.generate(token_ids, params, request_id=request_id)
        part = await self.backend.generate(token_ids, replace(params, max_new_tokens=TOKENS), request_id=request_id)
        return replace(part, finish_reason="abort") if part.finish_reason == "length" else part


async def answers(client: httpx.Client, tiny: Path, *, abort: bool) -> list[list[int]]:
    template = ChatTemplate.from_folder(tiny)
    backend = EmbeddedBackend(str(client.base_url), 60.0)
    sampler = Aborting(backend) if abort else backend
    found = []
    for seed in range(ANSWERS):
        settings = replace(SETTINGS, sampling=replace(SETTINGS.sampling, seed=seed))
        session = ChatSession(sampler, template, settings)
        await session.create(messages=[{"role": "user", "content": "hello"}])
        found.append(session.trajectory.nodes[-1].token_ids)
    await backend.close()
    return found


async def test_a_continued_answer_draws_new_random_numbers(client: httpx.Client, tiny: Path) -> None:
    """At a temperature of a million a token is its uniform number times the vocabulary's size, rounded down."""
    whole = [np.array(ids) for ids in await answers(client, tiny, abort=True) if len(ids) == 2 * TOKENS]
    assert len(whole) >= ANSWERS // 2  # the others met an end-of-turn token
    before = np.concatenate([ids[:TOKENS] for ids in whole])
    after = np.concatenate([ids[TOKENS:] for ids in whole])
    assert abs(np.corrcoef(before, after)[0, 1]) < 5 / len(before) ** 0.5


async def test_the_same_seeds_give_the_same_answers_and_an_abort_keeps_what_was_sampled(
    client: httpx.Client, tiny: Path
) -> None:
    first, again = [await answers(client, tiny, abort=False) for _ in range(2)]
    aborted, repeated = [await answers(client, tiny, abort=True) for _ in range(2)]
    assert first == again and aborted == repeated
    assert [ids[:TOKENS] for ids in first] == [ids[:TOKENS] for ids in aborted]


@pytest.mark.parametrize("abort", [False, True])
async def test_episodes_with_neighbouring_seeds_are_independent(client: httpx.Client, tiny: Path, abort: bool) -> None:
    found = await answers(client, tiny, abort=abort)
    length = min(TOKENS // 2, *map(len, found))
    first = np.array([ids[:length] for ids in found])
    assert abs(np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]) < 5 / first[1:].size ** 0.5
