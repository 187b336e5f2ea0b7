"""Plays conversations of many turns through real chat sessions, at once or one after the other.

Guarantees: episodes run as the controller runs them, and each turn goes through the OpenAI-compatible session: messages
compared, rendered and encoded, answer decoded, parsed and recorded with its tokens. The server alone is simulated: it
answers at once, in this process. An episode that fails, or has another number of turns, ends the benchmark.
"""

import asyncio
import time
from pathlib import Path

from agentrl.core.episode import Task
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.sim.device import Speed
from agentrl.sim.server import SimServer

ANSWER = "It is not on this shelf."
NOTE = "Shelf {number} is empty. Look at the next one."


class Answering(SimServer):
    """A server that answers at once, with the same tokens.

    Args:
        template: Template of the conversations.
    """

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__("answering", Speed())
        self._ids = [*template.encode(ANSWER), template.eos_id]

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Answer."""
        count = len(self._ids)
        return Generation(list(self._ids), [-0.5] * count, [self.device.version] * count, "stop")


class Talking(RolloutWorkflow):
    """Holds a conversation, and lets others run after each answer, as one that waits for a tool does.

    Args:
        turns: Answers of an episode.
    """

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Sample each answer."""
        messages = [{"role": "user", "content": f"Where is book {seed}?"}]
        for number in range(self._turns):
            reply = await llm.session().chat.completions.create(messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": NOTE.format(number=number)})
            await asyncio.sleep(0)
        return Outcome(reward=1.0)


class SessionCrowd:
    """Episodes of real sessions.

    Args:
        model: Model folder, for its tokenizer and its chat template.
        turns: Answers of an episode.
    """

    def __init__(self, model: str, turns: int) -> None:
        template = ChatTemplate.from_folder(Path(model), policy="append")
        settings = SessionSettings(SamplingParams(max_new_tokens=64), 1 << 20, locked=True, model="m")
        self._client = ChatClient(Router([Answering(template)]), template, settings, settings)
        self._workflow, self._turns = Talking(turns), turns
        self._left, self._limits = Abandoned(), Limits(1e6, 30.0)

    async def at_once(self, episodes: int) -> float:
        """Returns the CPU seconds of an episode when all run at once."""
        start = time.process_time()
        await asyncio.gather(*(self._one(seed) for seed in range(episodes)))
        return (time.process_time() - start) / episodes

    async def in_turn(self, episodes: int) -> float:
        """Returns the CPU seconds of an episode when they run one after the other."""
        start = time.process_time()
        for seed in range(episodes):
            await self._one(seed)
        return (time.process_time() - start) / episodes

    async def _one(self, seed: int) -> None:
        episode = await run_episode(
            self._workflow,
            Task(id="crowd", data={}),
            self._client,
            group_id="g",
            index=seed,
            seed=seed,
            limits=self._limits,
            left=self._left,
            evaluation=True,
        )
        messages = episode.roles.get("assistant")
        if episode.failed or messages != 2 * self._turns:
            raise RuntimeError(f"an episode of the benchmark went wrong: {messages} messages, {episode.error}")
