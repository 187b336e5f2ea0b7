"""A conversation between a model and a person or an environment, through the session that training uses.

Guarantees: the agent, its session and the environment are the recipe's; an environment is always closed; a turn that
failed can be tried again, and nothing that was said before is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import NO_ENV
from agentrl.core.agent import Agent, Chat
from agentrl.core.contract import checked_reset, checked_reward, checked_step, checked_unfinished
from agentrl.core.environment import Environment
from agentrl.core.episode import Message, Trajectory
from agentrl.core.registry import load
from agentrl.envkit.make import make
from agentrl.inference.client import ASSISTANT, Client, EpisodeLLM
from agentrl.inference.sdk_client import OpenAINames


class OfferedTools(OpenAINames):
    """The agent's ``llm``: that of the episode, which remembers the tools that the role ``assistant`` offered last."""

    def __init__(self, llm: EpisodeLLM) -> None:
        self._llm = llm
        self._session = llm.session()
        self.tools: list[Any] = []

    async def create(self, **given: Any) -> Any:
        """Passes a call on to the session."""
        self.tools = list(given.get("tools") or ())
        return await self._session.chat.completions.create(**given)

    def session(self, role: str = ASSISTANT) -> Chat:
        """Returns the chat client of a role; only what ``assistant`` says is shown."""
        return self if role == ASSISTANT else self._llm.session(role)

    def reward(self, value: float, role: str | None = None, *, message: Message | None = None) -> None:
        """Credits a message, as in training."""
        self._llm.reward(value, role, message=message)

    def earned(self) -> float:
        """Returns the sum of the agent's own parts of the shared reward."""
        return self._llm.earned()

    @property
    def sampled(self) -> bool:
        """Whether the policy has sampled a message."""
        return self._llm.sampled


@dataclass(frozen=True)
class Step:
    """The environment's reply to an answer.

    Attributes:
        observation: Messages of the reply.
        reward: Reward of the step; ``None`` if it is missing.
        metrics: Numbers that the environment reported.
        end: ``terminated``, ``truncated`` or ``out of context``; ``None`` while the episode goes on.
    """

    observation: list[Message]
    reward: float | None
    metrics: dict[str, float]
    end: str | None


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
        self.offered = OfferedTools(llm)
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
        """Whether the model can go on without a message of the person: in an environment, or after a failed turn."""
        return self.env is not None or self._asked

    async def answer(self, text: str = "") -> int:
        """Lets the agent act.

        Args:
            text: Further message of the person; empty for none.

        Returns:
            Index of the first node of the trajectory that was not returned before.

        Raises:
            InferenceError: The server gave no answer; the turn can be tried again with an empty text.
            TemplateError: The chat template cannot render the conversation.
        """
        observation, self._pending = self._pending, []
        if text:
            observation = [*observation, {"role": "user", "content": text}]
        self._asked = True  # until the agent has answered: its own list has the messages from now on
        self._action = await self.agent.step(observation, self._info)
        self._asked = False
        first, self._shown = self._shown, len(self.trajectory.nodes)
        return first

    async def observe(self, env: Environment[Any, Any]) -> Step:
        """Gives the latest answer to the environment."""
        result = checked_step(await env.step(self._action), env)
        observed, reward, terminated, truncated, self._info = result
        self._pending = list(observed)
        end = "terminated" if terminated else "truncated" if truncated else None
        return self._step(list(observed), None if reward is None else checked_reward(reward, env), end)

    async def judge(self, env: Environment[Any, Any]) -> Step:
        """Ends an episode whose next prompt does not fit the context, as training does."""
        reward, self._info = checked_unfinished(await env.judge_unfinished(), env)
        value = None if reward is None else checked_reward(reward, env, "judge_unfinished")
        return self._step([], value, "out of context")

    def _step(self, observed: list[Message], reward: float | None, end: str | None) -> Step:
        self.total = None if reward is None or self.total is None else self.total + reward
        self.over = end is not None
        return Step(observed, reward, self._info.get("metrics", {}), end)

    def _leave(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None

    async def close(self) -> None:
        """Closes the environment and gives the session back."""
        self._leave()
        if self.env is not None:
            await self.env.close()
