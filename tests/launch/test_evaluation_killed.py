"""A command that is killed at random moments asks for nothing twice, and Inspect AI reads its log.

Long: each moment starts a process, and Inspect AI has an environment of its own, because its requirements are not ours.
"""

import asyncio
import json
import os
import random
import subprocess
import venv
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from agentrl.launch.exported import export
from tests.launch.test_evaluation_api import Api, answer, command, evaluated

pytestmark = pytest.mark.long


async def test_killed_twenty_times_every_judged_episode_was_asked_for_once(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    rng = random.Random(1)
    api, judged = Api(seconds=0.02), 0

    async def running(process: asyncio.subprocess.Process, seconds: float) -> None:
        """Kills the process so long after its first request."""
        before = len(api.requests)
        while len(api.requests) == before and process.returncode is None:
            await asyncio.sleep(0.02)
        await asyncio.sleep(seconds)
        if process.returncode is None:
            process.kill()
        await process.wait()

    async with api.serving() as url:
        for _ in range(20):
            before = len(api.requests)
            async with command(url, folder) as process:
                await running(process, rng.uniform(0, 0.06))
            file = folder / "eval-episodes.jsonl"
            lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
            assert len(lines) - judged <= len(api.requests) - before <= len(lines) - judged + 2, "two run at a time"
            judged = len(lines)
        async with command(url, folder) as process:
            out, _ = await process.communicate()
    assert process.returncode in (0, 2), out.decode()  # 2: it was finished before
    records = [json.loads(line) for line in (folder / "eval-episodes.jsonl").read_text().splitlines()]
    assert max(Counter((one["group_id"], one["index"]) for one in records).values()) == 1 and len(records) == 40
    assert json.loads((folder / "result.json").read_text())["eval/n"] == 40


@pytest.fixture(scope="module")
def inspect_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with Inspect AI: that of ``$AGENTRL_INSPECT_PYTHON``, or of a new environment."""
    given = os.environ.get("AGENTRL_INSPECT_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("inspect")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "inspect-ai"], check=True)
    return python


READ = """
import json, sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1])
scores = {one.name: one.metrics["mean"].value for one in log.results.scores}
errors = sum(one.error is not None for one in log.samples)
calls = [call.function for one in log.samples for m in one.messages for call in (getattr(m, "tool_calls", None) or [])]
print(json.dumps([log.status, len(log.samples), errors, scores["accuracy"], log.eval.model, calls]))
"""


async def test_inspects_library_reads_the_log(tmp_path: Path, inspect_python: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "1+1"}'}}

    def reply(number: int, body: dict) -> web.Response:
        return answer("tool_calls", content=None, tool_calls=[call]) if number % 2 else answer(content="#### 3")

    own = ("env.id=calculator", "valid_dataset.name=calculation", "agent.id=chat", "rollout.max_concurrent=1")
    _, text, result = await evaluated(Api(reply), tmp_path, "eval.tasks=6", "env.kwargs={}", *own)
    path = export(tmp_path, "inspect", None, Console(quiet=True))
    done = subprocess.run([inspect_python, "-c", READ, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status, samples, errors, accuracy, model, calls = json.loads(done.stdout)
    assert (status, samples, errors, model) == ("success", 6, result["eval/invalid"], "openai-api/m"), text
    assert accuracy == pytest.approx(result["eval/accuracy"]) and calls.count("calculate") == 6
