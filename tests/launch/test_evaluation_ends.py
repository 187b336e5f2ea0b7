"""An evaluation ends, and its process too, whatever code of the environment does."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.launch.score import last_lines

ANSWER = {
    "id": "x", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42 \x1b[2J\ud83d"}}],
}  # fmt: skip

ENVIRONMENT = """
import asyncio, threading, time
from agentrl.envs.arithmetic import Arithmetic

class Faulty(Arithmetic):
    made = 0
    mine = None
    async def reset(self, *, seed=None, options=None):
        Faulty.made += 1
        self.mine = Faulty.made
        return await super().reset(seed=seed, options=options)
    async def step(self, action):
        if self.mine in (ALL):
            open("stuck", "a").write("x")
        while self.mine in (SWALLOWS):
            try:
                await asyncio.Event().wait()
            except BaseException:
                continue
        if self.mine == 5:
            await asyncio.to_thread(time.sleep, 3600)
        if self.mine == 6:
            threading.Thread(target=time.sleep, args=(3600,)).start()
        if self.mine == 7:
            raise ValueError("half a pair: \\ud83d, and \\x1b]0;title\\x07")
        return await super().step(action)
    async def close(self):
        while self.mine == 2:
            await asyncio.Event().wait()
"""


@asynccontextmanager
async def evaluation(folder: Path, swallows: str, *overrides: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that evaluates eight tasks on an API in this process."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(ANSWER)

    (folder / "faulty.py").write_text(ENVIRONMENT.replace("SWALLOWS", swallows).replace("ALL", swallows))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl", "recipe", "run", "arithmetic_grpo", "trainer.type=null",
            "inference.engine=openai", f"inference.urls=['{server.make_url('/v1')}']", "inference.model=m",
            f"env.id={folder / 'faulty.py'}:Faulty", "valid_dataset.name=calculation", "eval.tasks=8", "name=ends",
            f"launch.run_dir={folder}", "rollout.max_concurrent=8", "rollout.close_timeout=0.5", *overrides,
            cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "160"},
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_the_end_of_a_failure_begins_with_a_line() -> None:
    stack = "\n".join(f"  line {number}" for number in range(200))
    shown = last_lines(stack)
    assert stack.endswith("\n" + shown) and 580 < len(shown) <= 600
    assert last_lines("short\ntext") == "short\ntext" and last_lines("x" * 700) == "x" * 600
    assert last_lines("first\nsecond", most=6) == "second"


async def test_eight_episodes_of_which_one_hangs_in_close_and_one_swallows_its_cancellation(tmp_path: Path) -> None:
    async with evaluation(tmp_path, "3,", "rollout.episode_timeout=2") as process:
        async with asyncio.timeout(300):
            said = (await process.communicate())[0].decode()
    assert process.returncode == 1, said  # some were lost
    result = json.loads((tmp_path / "ends" / "result.json").read_text())
    assert (result["eval/n"], result["eval/invalid"], result["eval/abandoned"]) == (5, 3, 2), said
    assert "2 abandoned" in said and "Faulty.step (faulty.py:" in said and "never retrieved" not in said
    assert "\x1b]0" not in said and "half a pair: \ufffd, and \\x1b]0;title" in said
    lines = (tmp_path / "ends" / "eval-episodes.jsonl").read_text().split("\n")[:-1]
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == 8 == len("\n".join(lines).splitlines())
    found = sorted((one["stop_reason"], one["abandoned"]) for one in episodes if one["error"])
    assert found == [
        ("environment_error", False),
        ("terminated", True),
        ("timeout", False),
        ("timeout", True),
    ]
    assert all(
        node["message"]["content"] == "42 \x1b[2J\ufffd"
        for one in episodes
        for node in one["trajectories"]["assistant"]["nodes"][1:]
    )


async def test_an_evaluation_in_which_all_places_are_abandoned_ends_with_a_diagnosis(tmp_path: Path) -> None:
    limits = ("rollout.episode_timeout=0.5", "rollout.max_concurrent=2")
    async with evaluation(tmp_path, "1, 2, 3, 4, 5, 6, 7, 8", *limits) as process:
        async with asyncio.timeout(300):
            said = (await process.communicate())[0].decode()
    assert process.returncode == 1, said
    assert "the evaluation ended: 2 episodes were abandoned and still run" in said
    assert "Traceback" not in said


async def test_ctrl_c_ends_an_evaluation_whose_episodes_swallow_their_cancellation(tmp_path: Path) -> None:
    async with evaluation(tmp_path, "1, 2, 3, 4, 5, 6, 7, 8") as process:
        async with asyncio.timeout(300):
            while not (tmp_path / "stuck").is_file() or len((tmp_path / "stuck").read_text()) < 8:
                assert process.returncode is None
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGINT)
            said = (await process.communicate())[0].decode()
    assert process.returncode == 130 and "stopped" in said, said
