"""A command that is killed at random moments asks for nothing twice. Long: each moment starts a process."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.launch.test_evaluation_api import Api, command

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
