"""Measures a chat call's CPU time: agentrl's sessions against the ``openai`` client, and late turns against early ones.

Guarantees: only this process's CPU time counts; the server is another process that answers at once; the two clients
alternate within each repeat; agentrl's session also renders the chat template, stores the ids and builds the same
response objects.
"""

import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.bench.report import default_model

if TYPE_CHECKING:
    from agentrl.inference.session import ChatSession

CALLS = 200  # calls per measurement
GROUP = 8  # calls with the same prompt, as the episodes of a group
EARLY, LATE, AROUND = 8, 128, 4  # compared turns; each is the median of AROUND turns on both sides in all conversations
CONVERSATIONS = 6
_NUMBERS = itertools.count()
PROMPT: dict[str, Any] = {"role": "user", "content": "What is 17 + 25? Reply with just the number."}


def run(model: str | None = None, repeats: int = 5) -> dict[str, list[float]]:
    """Measure ``repeats`` times.

    Args:
        model: Model folder, for its chat template; by default the 135M model of the recipes.
        repeats: Number of interleaved measurements.

    Returns:
        ``cpu_vs_openai``: CPU time of a call over that of the ``openai`` client; ``turn128_vs_turn8``: CPU time of
        turn 128 over that of turn 8; ``ours_ms`` and ``openai_ms``: CPU milliseconds per call of each client.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.bench.instant_server"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        return asyncio.run(_measure(url, Path(model or default_model()), repeats))
    finally:
        process.terminate()
        process.wait()


async def _measure(url: str, model: Path, repeats: int) -> dict[str, list[float]]:
    from openai import AsyncOpenAI

    from agentrl.inference.backend import SamplingParams
    from agentrl.inference.kinds.sglang import SGLangBackend
    from agentrl.inference.router import Router
    from agentrl.inference.session import ChatSession, SessionSettings
    from agentrl.inference.template import ChatTemplate

    template = ChatTemplate.from_folder(model)
    router = Router([SGLangBackend(url, 60.0)])
    settings = SessionSettings(SamplingParams(max_new_tokens=16), 1 << 20, locked=True, model="m")

    def session() -> "ChatSession":
        return ChatSession(router.lease(), template, settings)

    async def ours(prompt: dict[str, Any]) -> None:
        await session().create(messages=[prompt])

    figures: dict[str, list[float]] = {
        "cpu_vs_openai": [], "turn128_vs_turn8": [], "ours_ms": [], "openai_ms": [],
    }  # fmt: skip
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def plain(prompt: dict[str, Any]) -> None:
            await client.chat.completions.create(model="m", messages=[prompt])  # type: ignore[list-item]

        for repeat in range(repeats + 1):
            own, other = await _cpu(ours, CALLS), await _cpu(plain, CALLS)
            early, late = await _turns([session() for _ in range(CONVERSATIONS)])
            if repeat:  # the first repeat warms up
                figures["cpu_vs_openai"].append(own / other)
                figures["turn128_vs_turn8"].append(late / early)
                figures["ours_ms"].append(own * 1e3)
                figures["openai_ms"].append(other * 1e3)
    await router.close()
    return figures


async def _cpu(call: Callable[[dict[str, Any]], Awaitable[None]], count: int) -> float:
    """CPU seconds of one call; each group has a new prompt."""
    prompts = [{**PROMPT, "content": f"{PROMPT['content']} (No. {next(_NUMBERS)})"} for _ in range(count // GROUP)]
    start = time.process_time()
    for prompt in prompts:
        for _ in range(GROUP):
            await call(prompt)
    return (time.process_time() - start) / (len(prompts) * GROUP)


async def _turns(sessions: "Sequence[ChatSession]") -> tuple[float, float]:
    """CPU seconds of an early and a late turn of a conversation."""
    seconds = [await _conversation(session) for session in sessions]

    def around(turn: int) -> float:
        return statistics.median(second for one in seconds for second in one[turn - AROUND : turn + AROUND])

    return around(EARLY), around(LATE)


async def _conversation(session: "ChatSession") -> list[float]:
    """CPU seconds of each turn of a conversation."""
    messages: list[Any] = []
    seconds: list[float] = []
    for _ in range(LATE + AROUND):
        messages.append(PROMPT)
        start = time.process_time()
        reply = await session.create(messages=messages)
        seconds.append(time.process_time() - start)
        messages.append(reply.choices[0].message)
    return seconds
