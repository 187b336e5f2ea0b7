"""Compares the embedded engine's server with vLLM and SGLang, if they are installed, under the same load.

Guarantees: every server is started as in a run, in float32, and gets token ids over HTTP from agentrl's client; servers
are measured one at a time, interleaved, while the others are idle.
"""

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.bench.report import MODEL, default_model

if TYPE_CHECKING:
    import psutil

    from agentrl.inference.backend import Backend
    from agentrl.launch.supervisor import Supervisor

REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 32, (50, 64), 128
OURS = "embedded"
VOCABULARY = 40_000  # every model used here has the ids below it


@dataclass
class _Server:
    backend: "Backend"
    process: "psutil.Process"


def run(
    model: str | None = None, repeats: int = 5, engines: tuple[str, ...] = (OURS, "vllm", "sglang")
) -> dict[str, list[float]]:
    """Measure all servers ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Number of interleaved measurements, after one that warms up.
        engines: Names of the engines to start, if installed.

    Returns:
        ``decode_vs_vllm`` and ``decode_vs_sglang``, if installed: tokens per second of the embedded engine over those
        of the other server; each server's tokens per second and, once, its resident memory after the load.
    """
    from agentrl.launch.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(Path(folder) / "logs")
        try:
            servers = _start(Path(model or default_model()), Path(folder), supervisor, engines)
            return asyncio.run(_measure(servers, repeats))
        finally:
            supervisor.stop()


def _start(model: Path, folder: Path, supervisor: "Supervisor", engines: tuple[str, ...]) -> dict[str, _Server]:
    import psutil

    from agentrl.config.errors import UserError
    from agentrl.config.recipe import Recipe
    from agentrl.launch.servers import server_python, start_servers
    from agentrl.rollout.assemble import make_backend

    found: dict[str, _Server] = {}
    for engine in engines:
        settings = {
            "model": {"name": MODEL},
            "env": {"id": "arithmetic"},
            "sampling": {"max_new_tokens": NEW_TOKENS},
            "inference": {
                "engine": engine, "dtype": "float32", "context_length": 512, "max_running": REQUESTS,
                "start_timeout": 600.0,
            },
            "trainer": {"type": None},
            "launch": {"device": "cpu"},
        }  # fmt: skip
        recipe = Recipe.model_validate(settings)
        try:
            server_python(recipe.inference)
        except UserError:
            continue
        place = folder / engine
        place.mkdir()
        before = {child.pid for child in psutil.Process().children()}
        (url,) = start_servers(recipe, model, place, supervisor)
        (process,) = (child for child in psutil.Process().children() if child.pid not in before)
        found[engine] = _Server(make_backend(recipe, url), process)
    return found


async def _measure(servers: dict[str, _Server], repeats: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    for repeat in range(-1, repeats):
        speeds = {name: await _tokens_a_second(server.backend, repeat) for name, server in servers.items()}
        if repeat < 0:
            continue
        for name, speed in speeds.items():
            figures.setdefault(f"{name}_tokens_s", []).append(speed)
            if name != OURS:
                figures.setdefault(f"decode_vs_{name}", []).append(speeds[OURS] / speed)
    for name, server in servers.items():
        figures[f"{name}_resident_mib"] = [_resident_mib(server.process)]
        await server.backend.close()
    return figures


async def _tokens_a_second(backend: "Backend", seed: int) -> float:
    from agentrl.inference.backend import SamplingParams

    rng = random.Random(seed)
    prompts = [[rng.randrange(100, VOCABULARY) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(REQUESTS)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0)
    begun = time.perf_counter()
    answers = await asyncio.gather(
        *(backend.generate(prompt, params, request_id=f"{seed}-{n}") for n, prompt in enumerate(prompts))
    )
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - begun)


def _resident_mib(process: "psutil.Process") -> float:
    """Resident memory of a process and all its descendants; shared pages count in each."""
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 2**20
