"""Resumes servers that a run left paused in a weight push: what a controller that was killed could not do.

Guarantees: only servers that this run paused are resumed, as its controller noted them in the run's folder before each
pause; a server whose lease ends by itself is not waited for. What can be known of other runs stands in
:mod:`agentrl.weights.pauses`.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.host.process import write_json
from agentrl.inference.backend import Backend, InferenceError, ServerUnreachable
from agentrl.rollout.assemble import make_backend
from agentrl.weights.pauses import END_SECONDS, until_resumed

PAUSED = "paused.json"  # in the run's processes/: URLs of the servers that it has paused; no file, none


def note_paused(run_dir: Path) -> Callable[[Sequence[str]], None]:
    """Returns a function that notes the URLs of paused servers in the run's folder."""
    file = run_dir / "processes" / PAUSED

    def note(urls: Sequence[str]) -> None:
        if urls:
            write_json(file, list(urls))
        else:
            file.unlink(missing_ok=True)

    return note


def resume_paused(recipe: Recipe, run_dir: Path) -> list[str]:
    """Resume the servers that the run noted as paused, now that its controller has ended.

    Returns:
        What could not be resumed, a sentence for each server.
    """
    file = run_dir / "processes" / PAUSED
    if not recipe.inference.urls or not file.is_file():
        return []
    urls = [url for url in json.loads(file.read_text()) if isinstance(url, str)]
    problems = asyncio.run(_resume(recipe, urls))
    file.unlink()
    return problems


async def _resume(recipe: Recipe, urls: Sequence[str]) -> list[str]:
    found = await asyncio.gather(*(_resume_one(make_backend(recipe, url)) for url in urls))
    return [problem for problem in found if problem]


async def _resume_one(backend: Backend) -> str:
    try:
        async with asyncio.timeout(END_SECONDS):
            await backend.resume()
    except (InferenceError, TimeoutError) as error:
        if backend.pause_lease is not None:
            return ""
        return f"{backend.url} may still be paused, resume it: {error or 'no answer'}"
    finally:
        await backend.close()
    return ""


async def take_over(backend: Backend, seconds: float) -> None:
    """Make a running server usable: if it is paused, wait ``seconds`` for whoever paused it, then resume it."""
    try:
        if not await until_resumed(backend, seconds):
            await backend.resume()
    except ServerUnreachable:
        return  # its requests say so
