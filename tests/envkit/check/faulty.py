"""Environments with one planted fault of the contract each; ``# FAULT`` stands on the line that must be named."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from agentrl import LanguageEnvironment, SingleTurnEnvironment, ToolEnvironment, tool
from agentrl.core.environment import Environment

TASKS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "parts": [n, n]} for n in range(20)]


class Good(LanguageEnvironment):
    """Two turns at most, no fault: the others change one thing."""

    dataset = TASKS
    reward_range = (0.0, 1.0)
    _task: dict[str, Any] | None = None
    _turn = 0

    async def reset(self, *, seed=None, options=None):
        self._task, self._turn = self.choose_task(seed, options), 0
        return [{"role": "user", "content": self._task["question"]}], {}

    async def step(self, action):
        if self._task is None:
            raise RuntimeError("step without an episode")
        self._turn += 1
        right = (action.get("content") or "") == self._task["answer"]
        over = right or self._turn == 2
        if over:
            self._task = None
        said = [] if over else [{"role": "user", "content": "Again?"}]
        return said, float(right), over, False, {"metrics": {"turns": self._turn}}


class Waiting(Good):
    """No fault either, but it waits."""

    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        await asyncio.sleep(0)
        return await super().step(action)


class Unmakeable(Good):
    def __init__(self):
        raise KeyError("token")  # FAULT


class UntypedTool(ToolEnvironment):
    dataset = TASKS

    @tool
    def weigh(self, item):
        return 1

    def prompt(self, task):
        return [{"role": "user", "content": task["question"]}]

    def reward(self, task, answer):
        return 0.0


class SyncReset(Good):
    def reset(self, *, seed=None, options=None):  # FAULT
        return [], {}


class OldReset(Good):
    async def reset(self):  # FAULT
        return [], {}


class NoSpaces(Environment):  # FAULT
    async def reset(self, *, seed=None, options=None):
        return 0, {}

    async def step(self, action):
        return 0, 0.0, True, False, {}


class SilentTool(ToolEnvironment):
    dataset = TASKS

    @tool  # FAULT
    def weigh(self, item: str) -> int:
        return 1

    def prompt(self, task):
        return [{"role": "user", "content": task["question"]}]

    def reward(self, task, answer):
        return float(answer == task["answer"])


class NoDatasetFile(Good):  # FAULT
    dataset = "no_such_file.jsonl"


class NoTask(Good):  # FAULT
    dataset = None


class Raises(Good):
    async def step(self, action):
        raise KeyError("score")  # FAULT


class Exits(Good):
    async def step(self, action):
        sys.exit(3)  # FAULT


class HangsAwait(Good):
    async def reset(self, *, seed=None, options=None):
        await asyncio.Event().wait()  # FAULT


class HangsSpinning(Good):
    async def step(self, action):
        while True:  # FAULT
            pass


class NeverFree(Good):
    async def step(self, action):
        threading.Event().wait(3.0)  # FAULT


class Configured(Good):
    def __init__(self, client: Any = None) -> None:
        self.client = client


class FourTuple(Good):
    async def step(self, action):  # FAULT
        return (await super().step(action))[:4]


class NoInfo(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        return (await super().reset(seed=seed, options=options))[0]


class IntDone(Good):
    async def step(self, action):  # FAULT
        observation, reward, terminated, truncated, info = await super().step(action)
        return observation, reward, int(terminated), truncated, info


class TextMetrics(Good):
    async def step(self, action):  # FAULT
        return (*(await super().step(action))[:4], {"metrics": {"verdict": "wrong"}})


class OutsideSpace(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        observation, info = await super().reset(seed=seed, options=options)
        return [{**observation[0], "content": 42}], info


class NanReward(SingleTurnEnvironment):
    dataset = TASKS

    def prompt(self, task):
        return [{"role": "user", "content": task["question"]}]

    def judge(self, task, answer):  # FAULT
        return float("nan")


class TextReward(NanReward):
    def judge(self, task, answer):  # FAULT
        return "1.0"


class NoReward(NanReward):
    def judge(self, task, answer):  # FAULT
        return None


class LargeReward(NanReward):
    reward_range = (0.0, 1.0)

    def judge(self, task, answer):  # FAULT
        return float(len(answer))


class EqualRewards(NanReward):
    def judge(self, task, answer):  # FAULT
        return 0.5


class ContentNeeded(NanReward):
    async def step(self, action):
        if self._task is None:
            raise RuntimeError("step without an episode")
        self._task = None
        return [], float(len(action["content"].strip())), True, False, {}  # FAULT


class ChangesTask(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        task = self.choose_task(seed, options)
        task["parts"].append(0)
        return await super().reset(seed=seed, options=task)


class ChangesAction(Good):
    async def step(self, action):  # FAULT
        action["content"] = (action.get("content") or "").strip() + "!"
        return await super().step(action)


class ReusesObservation(Good):
    async def reset(self, *, seed=None, options=None):
        self._messages, info = await super().reset(seed=seed, options=options)
        return self._messages, info

    async def step(self, action):  # FAULT
        _, *rest = await super().step(action)
        self._messages += [{"role": "user", "content": "Again?"}]
        return self._messages, *rest


def unpicklable() -> type[Good]:
    """A class that no other process can import."""

    class Local(Good):  # FAULT
        pass

    return Local


class Counter(Environment[np.ndarray, int]):
    """No messages: arrays and numbers."""

    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.int64)
    action_space = gymnasium.spaces.Discrete(3)
    _count: int | None = None

    async def reset(self, *, seed=None, options=None):
        self._count = int(seed or 0) % 5
        return np.array([self._count]), {}

    async def step(self, action):
        if self._count is None:
            raise RuntimeError("step without an episode")
        self._count += int(action)
        now, over = self._count, self._count >= 8
        if over:
            self._count = None
        return np.array([min(now, 10)]), float(action), over, False, {}


def place_of(name: str) -> str:
    """``file.py:12 `` of a class's ``# FAULT``, here or in a file beside it."""
    for file in Path(__file__).parent.glob("*.py"):
        inside = False
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("class "):
                inside = line.lstrip().startswith((f"class {name}(", f"class {name}:"))
            if inside and line.endswith("# FAULT"):
                return f"{file.name}:{number} "
    raise LookupError(name)


class SilentStart(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        await super().reset(seed=seed, options=options)
        return [], {}


class SilentTurn(Good):
    async def step(self, action):  # FAULT
        _, *rest = await super().step(action)
        return [], *rest


class OneTask(Good):  # FAULT
    dataset = TASKS[:1]


class MisspelledTool(ToolEnvironment):
    dataset = TASKS

    @tool  # FAULT
    def look(self, word: str) -> str:
        """Look a word up."""
        return wrod  # noqa: F821

    def prompt(self, task):
        return [{"role": "user", "content": task["question"]}]

    def reward(self, task, answer):
        return float(answer == task["answer"])
