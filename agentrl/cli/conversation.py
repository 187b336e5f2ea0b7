"""A conversation between a model and a person or an environment, through the session that training uses.

Guarantees: the agent, its session and the environment are the recipe's; an environment is always closed; a turn that
failed can be tried again, and nothing that was said before is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import NO_ENV
from agentrl.core.agent import Agent, ContextOverflow
from agentrl.core.contract import checked_reset, checked_reward, checked_step, checked_unfinished
from agentrl.core.environment import Environment
from agentrl.core.episode import Message, Trajectory
from agentrl.core.registry import load
from agentrl.envkit.make import make
from agentrl.inference.client import Client, Session


class OfferedTools:
    """The agent's chat client: a session that remembers which tools the latest call offered."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.tools: list[Any] = []

    @property
    def chat(self) -> "OfferedTools":
        """``openai``'s namespace."""
        return self

    @property
    def completions(self) -> "OfferedTools":
        """``openai``'s namespace."""
        return self

    async def create(self, **given: Any) -> Any:
        """Passes a call on to the session."""
        self.tools = list(given.get("tools") or ())
        return await self._session.chat.completions.create(**given)


@dataclass(frozen=True)
class Turn:
    """What one turn brought.

    Attributes:
        first: Index of the first node of the trajectory that is new.
        observation: Messages of the environment that follow the answer.
        reward: Reward of the step; ``None`` without an environment, or if it is missing.
        metrics: Numbers that the environment reported.
        end: ``terminated``, ``truncated`` or ``out of context``; ``None`` while the conversation goes on.
    """

    first: int
    observation: list[Message]
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    end: str | None = None


class Conversation:
    """One conversation after the other, with the recipe's agent.

    Args:
        recipe: The recipe; without an environment where ``env.id`` is ``none``.
        client: Client that opens the sessions.
    """

    def __init__(self, recipe: Recipe, client: Client) -> None:
        self._recipe, self._client = recipe, client
        self._agent_class = load("agent", recipe.agent.id)
        self._release: Callable[[], None] | None = None
        self._number = -1
        self.env: Environment[Any, Any] | None = None
        if recipe.env.id != NO_ENV:
            self.env = make(recipe.env.id, **recipe.env.kwargs)
        self.system: str | None = None
        self.over = False
        self.total: float | None = 0.0

    async def begin(self) -> list[Message]:
        """Starts a new conversation, with the next seed; returns the environment's first messages."""
        self._leave()
        self._number += 1
        seed = self._recipe.seed + self._number
        llm, self._release = self._client.acquire(evaluation=False, seed=seed)
        self.session = llm.session()
        self.offered = OfferedTools(self.session)
        self.agent: Agent = self._agent_class(self.offered, **self._recipe.agent.kwargs)
        self.over, self.total, self._shown = False, 0.0, 0
        self._info: dict[str, Any] = {}
        self._pending: list[Message] = []
        if self.env is not None:
            observation, self._info = checked_reset(await self.env.reset(seed=seed, options=None), self.env)
            self._pending = list(observation)
        await self.agent.reset(seed=seed, options=getattr(self.env, "chosen_task", None))
        if self.system is not None:
            if self._pending and self._pending[0].get("role") == "system":
                del self._pending[0]
            self._pending.insert(0, {"role": "system", "content": self.system})
        self._asked = False
        return list(self._pending)

    @property
    def trajectory(self) -> Trajectory:
        """The recorded trajectory of this conversation."""
        return self.session.trajectory

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the environment offers now."""
        return list(self._info.get("tools") or ())

    @property
    def can_answer(self) -> bool:
        """Whether something is there to be answered: messages of the environment, or a turn that failed."""
        return not self.over and (self._asked or any(one.get("role") != "system" for one in self._pending))

    async def answer(self, text: str = "") -> Turn:
        """Lets the agent act, then the environment if there is one.

        Args:
            text: Further message of the person; empty for none.

        Raises:
            InferenceError: The server gave no answer; the turn can be tried again with an empty text.
            TemplateError: The chat template cannot render the conversation.
        """
        observation, self._pending = self._pending, []
        if text:
            observation = [*observation, {"role": "user", "content": text}]
        self._asked = True  # until the agent has answered: its own list has the messages from now on
        first = self._shown
        try:
            action = await self.agent.step(observation, self._info)
        except ContextOverflow:
            if self.env is None or self.session.last_sampled is None:
                raise
            return await self._judged(first)
        self._asked, self._shown = False, len(self.trajectory.nodes)
        if self.env is None:
            return Turn(first, [])
        result = checked_step(await self.env.step(action), self.env)
        observed, reward, terminated, truncated, self._info = result
        self._pending = list(observed)
        end = "terminated" if terminated else "truncated" if truncated else None
        return self._turn(first, list(observed), reward, end, "step")

    async def _judged(self, first: int) -> Turn:
        """The end of an episode whose next prompt does not fit the context."""
        assert self.env is not None
        reward, self._info = checked_unfinished(await self.env.judge_unfinished(), self.env)
        return self._turn(first, [], reward, "out of context", "judge_unfinished")

    def _turn(self, first: int, observed: list[Message], reward: Any, end: str | None, method: str) -> Turn:
        value = None if reward is None else checked_reward(reward, self.env or self, method)
        self.total = None if value is None or self.total is None else self.total + value
        self.over = end is not None
        return Turn(first, observed, value, self._info.get("metrics", {}), end)

    def _leave(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None

    async def close(self) -> None:
        """Closes the environment and gives the session back."""
        self._leave()
        if self.env is not None:
            await self.env.close()
