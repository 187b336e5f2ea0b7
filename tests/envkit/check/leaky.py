"""Environments that block, leak or change what is not theirs; the comment ``# FAULT`` stands on the line to name."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, ClassVar

from agentrl import ToolEnvironment, tool
from tests.envkit.check.faulty import TASKS, Good

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


class Blocks(Good):
    async def step(self, action):
        time.sleep(0.08)  # FAULT
        return await super().step(action)


class BlockingTool(ToolEnvironment):
    dataset = TASKS

    @tool
    async def weigh(self, item: str) -> int:
        """Weigh an item."""
        time.sleep(0.08)  # FAULT
        return 1

    def prompt(self, task):
        return [{"role": "user", "content": task["question"]}]

    def reward(self, task, answer):
        return float(answer == task["answer"])


class Background(Good):
    async def reset(self, *, seed=None, options=None):
        asyncio.get_running_loop().create_task(self._dies())
        await asyncio.sleep(0)
        return await super().reset(seed=seed, options=options)

    async def _dies(self):
        raise ValueError("unseen")  # FAULT


class CancelLeaksProcess(Good):
    _process = None

    async def reset(self, *, seed=None, options=None):
        process = subprocess.Popen(SLEEPER)  # FAULT
        await asyncio.sleep(0.001)
        self._process = process
        return await super().reset(seed=seed, options=options)

    async def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class CancelLeaksThread(Good):
    async def step(self, action):
        done = threading.Event()
        threading.Thread(target=self._grade, args=(done,), daemon=True).start()
        await asyncio.sleep(0.001)
        done.set()
        return await super().step(action)

    def _grade(self, done):
        done.wait(60.0)  # FAULT


class Swallows(Good):
    async def step(self, action):  # FAULT
        try:
            await asyncio.sleep(0.001)
        except BaseException:
            self._turn = 0
        return await super().step(action)


class CloseRaises(Good):
    _client: Any = None

    async def close(self):
        self._client.close()  # FAULT


class CloseOnce(Good):
    _file: Any = None

    async def close(self):
        if self._file is None:
            self._file = object()
        else:
            raise RuntimeError("closed already")  # FAULT


class LeaksFile(Good):
    async def reset(self, *, seed=None, options=None):
        self._log = open(os.devnull, "rb")  # noqa: SIM115 # FAULT
        return await super().reset(seed=seed, options=options)


class LeaksSocket(Good):
    async def reset(self, *, seed=None, options=None):
        self._socket = socket.socket()  # FAULT
        return await super().reset(seed=seed, options=options)


class LeaksProcess(Good):
    async def reset(self, *, seed=None, options=None):
        self._process = subprocess.Popen(SLEEPER)  # FAULT
        return await super().reset(seed=seed, options=options)


class LeaksTask(Good):
    async def reset(self, *, seed=None, options=None):
        self._poll = asyncio.create_task(self._polls())
        return await super().reset(seed=seed, options=options)

    async def _polls(self):
        await asyncio.Event().wait()  # FAULT


class LeaksThread(Good):
    async def reset(self, *, seed=None, options=None):
        threading.Thread(target=self._polls, daemon=True).start()
        return await super().reset(seed=seed, options=options)

    def _polls(self):
        threading.Event().wait()  # FAULT


class KeepsProcess(Good):
    stop: ClassVar[threading.Event] = threading.Event()

    async def reset(self, *, seed=None, options=None):
        threading.Thread(target=self.stop.wait).start()
        return await super().reset(seed=seed, options=options)


class Talks(Good):
    async def reset(self, *, seed=None, options=None):
        print("talking")
        return await super().reset(seed=seed, options=options)


class SharesState(Good):
    _seen: ClassVar[list[str]] = []

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        SharesState._seen[:] = [observation[0]["content"]]
        return observation, info

    async def step(self, action):  # FAULT
        _, *rest = await super().step(action)
        return [{"role": "user", "content": SharesState._seen[0]}], *rest


class ChangesVariables(Good):
    async def reset(self, *, seed=None, options=None):
        os.environ["ENVCHECK_PLANTED"] = "1"  # FAULT
        return await super().reset(seed=seed, options=options)


class ChangesFolder(Good):
    async def reset(self, *, seed=None, options=None):
        os.chdir(tempfile.gettempdir())  # FAULT
        return await super().reset(seed=seed, options=options)
