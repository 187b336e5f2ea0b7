"""Environments whose episodes differ where they must not; ``# FAULT`` stands on the line that must be named."""

import random

from tests.envkit.check.faulty import TASKS, Good


class Unseeded(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        observation, info = await super().reset(seed=seed, options=options)
        return [{**observation[0], "content": f"{observation[0]['content']} {random.random()}"}], info


class UnseededTask(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        return await super().reset(seed=None, options=options or {**TASKS[0], "question": str(random.random())})


class OrderOfSet(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        observation, info = await super().reset(seed=seed, options=options)
        words = " ".join({f"word{n}" for n in range(20)})
        return [{**observation[0], "content": words + observation[0]["content"]}], info


class SameStart(Good):
    async def reset(self, *, seed=None, options=None):  # FAULT
        return await super().reset(seed=seed, options=TASKS[0])


class KeepsTurns(Good):
    async def reset(self, *, seed=None, options=None):
        turn = self._turn
        result = await super().reset(seed=seed, options=options)
        self._turn = turn
        return result

    async def step(self, action):  # FAULT
        observation, reward, terminated, _, info = await super().step(action)
        over = terminated or self._turn > 2
        return observation, reward, over, False, info


class OneEpisode(Good):
    _used = False

    async def reset(self, *, seed=None, options=None):
        if self._used and self._task is None:
            raise RuntimeError("used")  # FAULT
        self._used = True
        return await super().reset(seed=seed, options=options)


class NoSecondReset(Good):
    async def reset(self, *, seed=None, options=None):
        if self._task is not None:
            raise RuntimeError("an episode is running")  # FAULT
        return await super().reset(seed=seed, options=options)


class GoesOn(Good):
    async def reset(self, *, seed=None, options=None):
        self._answer = None
        return await super().reset(seed=seed, options=options)

    async def step(self, action):  # FAULT
        if self._task is None and hasattr(self, "_answer"):
            return [], 1.0, True, False, {}
        return await super().step(action)


class StartsItself(Good):
    async def step(self, action):  # FAULT
        if self._task is None and self._turn == 0:
            return [], 0.0, True, False, {}
        return await super().step(action)
