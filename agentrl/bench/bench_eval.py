"""Measures evaluations: tasks per second against a bare ``gather`` of requests, and memory by number of tasks.

Guarantees: both sides send the same requests with the ``openai`` client to the same server, which is another process
and takes :data:`SECONDS` for each answer, and alternate within each repeat; the evaluation also runs the environment,
writes every episode, and counts. Memory is that of processes of their own, with tasks that take none. Where it is, is
said on standard error.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.host.garbage import collect_rarely

SECONDS = 1.0  # of an answer, as short as those of commercial APIs are
TASKS = 512  # of a measurement: two rounds of the requests at a time
FEW, MANY = 1_000, 100_000


def run(repeats: int = 5, memory_repeats: int = 1, say: Callable[[str], None] | None = None) -> dict[str, list[float]]:
    """Measure.

    Args:
        repeats: Number of interleaved measurements of speed.
        memory_repeats: Number of measurements of memory.
        say: Called with a sentence after each measurement; by default it goes to standard error.

    Returns:
        ``tasks_vs_gather``: tasks per second over those of the bare ``gather`` at 256 at a time;
        ``instant_vs_gather``: the same where the server answers at once, so that only the processor's time counts;
        ``tasks_per_s``: tasks per second; ``rss_growth``: largest resident memory with 100,000 tasks over that with
        1,000; ``rss_mb``: that of 100,000 tasks in megabytes.
    """
    say = say or _say
    collect_rarely()  # as the command does; for both sides
    figures: dict[str, list[float]] = {
        **{"tasks_vs_gather": [], "instant_vs_gather": [], "tasks_per_s": [], "rss_growth": [], "rss_mb": []}
    }
    for seconds, name in ((0.0, "instant_vs_gather"), (SECONDS, "tasks_vs_gather")):
        with server(seconds) as url:
            if not seconds:
                asyncio.run(_ours(url))  # warms up
                asyncio.run(_bare(url))
            for repeat in range(repeats):
                ours, bare = asyncio.run(_ours(url)), asyncio.run(_bare(url))
                figures[name].append(bare / ours)
                if seconds:
                    figures["tasks_per_s"].append(TASKS / ours)
                speeds = f"{TASKS / ours:.0f} tasks a second, a bare gather {TASKS / bare:.0f}"
                say(f"answers of {seconds:g} s, {repeat + 1} of {repeats}: {speeds}")
    for _ in range(memory_repeats):
        say(f"memory of {FEW} and of {MANY} tasks")
        few, many = resident(FEW), resident(MANY)
        figures["rss_growth"].append(many / few)
        figures["rss_mb"].append(many / 1024)
    return figures


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def server(seconds: float) -> Iterator[str]:
    """Runs a server whose answers take so many seconds; gives its URL."""
    command = [sys.executable, "-m", "agentrl.bench.instant_server", str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def resident(tasks: int) -> float:
    """Returns the largest resident memory of an evaluation in a process of its own, in KiB."""
    command = [sys.executable, "-m", "agentrl.bench.eval_sides", str(tasks)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def _ours(url: str) -> float:
    """Seconds of an evaluation."""
    from agentrl.bench.eval_sides import evaluate, recipe_at

    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_at(url)
        start = time.perf_counter()
        summary = await evaluate(recipe, TASKS, Path(folder))
        seconds = time.perf_counter() - start
    assert summary.n == TASKS
    return seconds


async def _bare(url: str) -> float:
    """Seconds of the same requests in a bare ``gather``."""
    from openai import AsyncOpenAI

    from agentrl.bench.eval_sides import CONCURRENT, Sums

    rows, places = Sums(TASKS), asyncio.Semaphore(CONCURRENT)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def ask(row: dict[str, Any]) -> None:
            async with places:
                message = {"role": "user", "content": f"{row['question']} Reply with just the number."}
                await client.chat.completions.create(model="m", messages=[message], temperature=0, max_tokens=64)  # type: ignore[list-item]

        start = time.perf_counter()
        await asyncio.gather(*(ask(row) for row in rows))
        return time.perf_counter() - start
