"""Measures episodes per second of the whole agent-environment loop, against the same calls in a bare ``gather``.

Guarantees: both sides make the same three chat calls through the same sessions and call the same tool, in this process,
with a server that answers at once. One side adds environment, agent, workflow and the episode record, so the ratio
shows their cost. Memory growth is measured afterwards, on this side alone.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl.bench.report import default_model
from agentrl.core.episode import Task
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.envkit.tools.tool_calls import run_tool_calls

if TYPE_CHECKING:
    from agentrl.inference.client import EpisodeLLM
    from agentrl.inference.template import ChatTemplate

EPISODES = 512  # episodes per measurement
AT_ONCE = 64
LONG = 100_000  # episodes of the memory measurement
TURNS = ('{"expression": "348 * 27"}', '{"expression": "9396 + 1"}')  # tool calls; the third turn is the answer
TASK = Task(id="bench/0", data={"question": "What is 348 * 27 + 1?", "answer": "9397"})


def run(model: str | None = None, repeats: int = 5, long: int = LONG) -> dict[str, list[float]]:
    """Measure speed ``repeats`` times, then memory growth over ``long`` episodes.

    Args:
        model: Model folder, for its tokenizer; by default the 135M model of the recipes.
        repeats: Number of interleaved measurements.
        long: Number of episodes of the memory measurement.

    Returns:
        ``episodes_vs_gather``: episodes per second over those of ``gather``; ``rss_growth``: resident memory in the
        last tenth of the episodes over that in the first; ``episodes_s`` and ``gather_s``: episodes per second.
    """
    return asyncio.run(_measure(model or default_model(), repeats, long))


async def _measure(model: str, repeats: int, long: int) -> dict[str, list[float]]:
    client = InstantClient(model)
    workflow = AgentEnvWorkflow("Calculator-v0")
    figures: dict[str, list[float]] = {
        "episodes_vs_gather": [], "rss_growth": [], "episodes_s": [], "gather_s": [],
    }  # fmt: skip
    for repeat in range(repeats + 1):
        theirs = await _rate(lambda index: bare_episode(client), EPISODES)
        ours = await _rate(lambda index: whole_episode(client, workflow, index), EPISODES)
        if repeat:  # the first repeat warms up
            figures["episodes_vs_gather"].append(ours / theirs)
            figures["episodes_s"].append(ours)
            figures["gather_s"].append(theirs)
    figures["rss_growth"].append(await _growth(client, workflow, long))
    return figures


async def _rate(episode: Callable[[int], Any], count: int) -> float:
    start = time.perf_counter()
    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(episode(first + index) for index in range(AT_ONCE)))
    return count / (time.perf_counter() - start)


async def _growth(client: "InstantClient", workflow: AgentEnvWorkflow, long: int) -> float:
    """Largest resident memory in the last tenth of the episodes over the largest in the first tenth."""
    import psutil

    process = psutil.Process()
    largest = {"first": 0, "last": 0}
    for first in range(0, long, AT_ONCE):
        await asyncio.gather(*(whole_episode(client, workflow, first + index) for index in range(AT_ONCE)))
        tenth = "first" if first < long / 10 else "last" if first >= long * 9 / 10 else None
        if tenth:
            largest[tenth] = max(largest[tenth], process.memory_info().rss)
    return largest["last"] / largest["first"]


async def whole_episode(client: "InstantClient", workflow: AgentEnvWorkflow, index: int) -> None:
    """Runs one episode as the controller does."""
    from agentrl.rollout.abandoned import Abandoned
    from agentrl.rollout.deadline import Limits
    from agentrl.rollout.episode_runner import run_episode

    name, limits, left = f"g{index // 8}", Limits(600.0, 30.0), Abandoned()
    episode = await run_episode(
        workflow, TASK, client, group_id=name, index=index % 8, seed=index, limits=limits, left=left, evaluation=True
    )
    if episode.reward != 1.2:
        raise RuntimeError(f"the benchmark's episode went wrong: {episode.stop_reason} {episode.error}")


async def bare_episode(client: "InstantClient") -> None:
    """Makes the chat and tool calls of an episode without the environment loop."""
    llm, release = client.acquire(evaluation=True, seed=0)
    tools = client.env.tools
    schemas = [tool.schema() for tool in tools]
    messages: list[Any] = client.env.prompt(TASK.data)
    for _ in range(len(TURNS) + 1):
        reply = await llm.session().chat.completions.create(messages=messages, tools=schemas)
        message = reply.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        messages += [event.message for event in await run_tool_calls(message, tools)]
    release()


class InstantClient:
    """Gives episodes sessions on a server in this process that answers at once.

    Args:
        model: Model folder, for its tokenizer.
    """

    def __init__(self, model: str) -> None:
        from pathlib import Path

        from agentrl.envkit.make import make
        from agentrl.inference.backend import SamplingParams
        from agentrl.inference.session import SessionSettings
        from agentrl.inference.template import ChatTemplate

        self._template = ChatTemplate.from_folder(Path(model), source="chatml_tools")
        self._settings = SessionSettings(SamplingParams(max_new_tokens=64), 1 << 20, locked=True, model="m")
        self._server = Instant(self._template)
        self.env: Any = make("Calculator-v0")

    def acquire(self, *, evaluation: bool, seed: int) -> "tuple[EpisodeLLM, Callable[[], None]]":
        """Returns a handle; releasing it does nothing."""
        from agentrl.inference.client import EpisodeLLM
        from agentrl.inference.session import ChatSession

        return EpisodeLLM(lambda _: ChatSession(self._server, self._template, self._settings)), lambda: None


class Instant:
    """Returns the tool calls and then the answer, chosen by the number of turns in the prompt."""

    url = "in this process"

    def __init__(self, template: "ChatTemplate") -> None:
        said = [f'<tool_call>{{"name": "calculate", "arguments": {call}}}</tool_call>' for call in TURNS]
        self._answers = [[*template.encode(text), template.eos_id] for text in [*said, TASK.data["answer"]]]
        self._turn = template.encode("<|im_start|>assistant")[0], template.encode("assistant")[0]

    async def generate(self, token_ids: list[int], params: Any, *, request_id: str) -> Any:
        """Returns the next answer."""
        from agentrl.inference.backend import Generation

        start, role = self._turn
        turns = sum(a == start and b == role for a, b in itertools.pairwise(token_ids))
        ids = self._answers[turns - 1]
        return Generation(list(ids), [-0.5] * len(ids), [0] * len(ids), "stop")
