"""Sides of ``agentrl bench eval``: tasks that are made when they are asked for, and evaluations of them.

Guarantees: the tasks take no memory, so that what grows with their number is the evaluation's own. ``python -m
agentrl.bench.eval_sides TASKS`` evaluates so many tasks without a network and prints its largest resident memory.
"""

import asyncio
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

from openai.types.chat import ChatCompletion

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.data.datasets import LoadedTasks, TableTasks
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.metrics import EvalSummary
from agentrl.evaluate.stored import TaskFile, write_result
from agentrl.host.garbage import collect_rarely
from agentrl.inference.client import EpisodeDoor, EpisodeLLM, EvaluationClient
from agentrl.inference.concurrency import Waits
from agentrl.inference.kinds.openai import OpenAISession
from agentrl.rollout.assemble import make_text_client, make_workflow
from agentrl.rollout.journal import Journal

CONCURRENT = 256
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42"}}],
    "usage": {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42},
}


class Sums(Sequence[dict[str, Any]]):
    """Rows of sums, computed from their number.

    Args:
        count: Number of rows.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        return {"question": f"What is {index} + 25?", "answer": str(index + 25), "tag": f"tag {index % 4}"}


class InstantCalls:
    """Answers each call at once, in this process."""

    url = "instant"

    async def ask(self, arguments: dict[str, Any], waits: Waits) -> Any:
        """Returns an answer of its own for each call, as an API's client does."""
        await asyncio.sleep(0)
        return ChatCompletion.model_validate(ANSWER)


class InstantClient:
    """Client whose sessions are answered at once."""

    problem = ""
    notes: list[str] = []  # noqa: RUF012 - never changed

    async def close(self) -> None:
        """Does nothing: there is no connection."""

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle of an episode."""
        door = EpisodeDoor()
        calls = InstantCalls()
        made = EpisodeLLM(lambda role: OpenAISession(calls, "m", {}, seed, role, door), door, {})
        return made, lambda: setattr(door, "open", False)


def recipe_at(url: str) -> Recipe:
    """Returns the recipe of an evaluation of sums at an API."""
    settings = ["trainer.type=null", "inference.engine=openai", f"inference.urls=['{url}/v1']", "inference.model=m"]
    more = ["eval.tasks=null", f"rollout.max_concurrent={CONCURRENT}", "sampling.max_new_tokens=64"]
    return load_recipe("arithmetic_grpo", [*settings, *more], device="cpu")


async def evaluate(recipe: Recipe, tasks: int, folder: Path, client: EvaluationClient | None = None) -> EvalSummary:
    """Evaluates sums, with everything that an evaluation writes.

    Args:
        recipe: Recipe of the evaluation.
        tasks: Number of tasks.
        folder: Folder for its files.
        client: Client; by default one of the recipe's API.
    """
    api = client or make_text_client(recipe, recipe.inference.urls[0])
    journal, lines = Journal(folder, episodes=True), TaskFile(folder)
    loaded = LoadedTasks(TableTasks(Sums(tasks), "test", range(tasks)), "sums")
    evaluator = Evaluator(recipe, make_workflow(recipe), api, journal, loaded, keep=False)
    evaluator.on_task = lines.add
    try:
        summary = await evaluator.run(0)
    finally:
        await api.close()
        journal.close()
        lines.close()
    write_result(folder / "result.json", evaluator.as_json(summary))
    return summary


def main() -> None:
    """Evaluates so many tasks without a network and prints the largest resident memory, in KiB."""
    collect_rarely()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(evaluate(recipe_at("http://127.0.0.1:9"), int(sys.argv[1]), Path(folder), InstantClient()))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    main()
