"""Environments that the tests of the wrappers share."""

import asyncio
import threading
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl import LanguageEnvironment, Message, ToolEnvironment, tool
from agentrl.envkit.wrappers.translate import game_name


class Echo(LanguageEnvironment):
    """Repeats what it hears; ``bye`` terminates with reward 1, ``nothing`` has no reward."""

    dataset = [{"word": word} for word in "abcdefghij"]  # noqa: RUF012
    reward_range = (0.0, 1.0)
    closed = 0
    task: dict[str, Any] | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        self.task = self.choose_task(seed, options)
        return [{"role": "user", "content": self.task["word"]}], {}

    async def step(self, action: Message) -> tuple[list[Message], Any, bool, bool, dict[str, Any]]:
        text = action.get("content") or ""
        reward = {"bye": 1.0, "nothing": None}.get(text, 0.5)
        return [{"role": "user", "content": text}], reward, text == "bye", False, {"metrics": {"length": len(text)}}

    async def close(self) -> None:
        self.closed += 1


class Shop(ToolEnvironment):
    """One tool, one answer."""

    asked: int = 0

    @tool
    def price(self, item: str) -> str:
        """Price of an item.

        Args:
            item: What is bought.
        """
        self.asked += 1
        return item * 100

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    def reward(self, task: dict[str, Any], answer: str) -> float:
        return float(answer == "9")


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def buy(*items: str) -> Message:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "price", "arguments": f'{{"item": "{item}"}}'}}
        for i, item in enumerate(items)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def play(env: Any, *texts: str, **reset: Any) -> list[Any]:
    """Results of reset and of each step, from outside of any loop."""

    async def run() -> list[Any]:
        results: list[Any] = [await env.reset(**reset)]
        for text in texts:
            results.append(await env.step(say(text)))
        return results

    return asyncio.run(run())


class Slow(gymnasium.Env[Any, Any]):
    """Waits in each step for ``gate``; counts what is alive and what runs."""

    observation_space = spaces.Discrete(3)
    action_space = spaces.Discrete(3)
    metadata = {"render_modes": []}  # noqa: RUF012
    gate = threading.Event()
    entered = threading.Event()
    closed = threading.Event()
    made = running = most = 0

    def __init__(self) -> None:
        Slow.made += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return 0, {"seed": seed, "options": options}

    def step(self, action: Any) -> Any:
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        Slow.entered.set()
        if action == 2:
            assert Slow.gate.wait(30)
        Slow.running -= 1
        return int(action), 0.1, False, False, {}

    def close(self) -> None:
        Slow.closed.set()


def newest(name: str) -> str:
    """Gymnasium takes old versions away: the one that is there."""
    return max(id for id in gymnasium.registry if "/" not in id and game_name(id) == name)
