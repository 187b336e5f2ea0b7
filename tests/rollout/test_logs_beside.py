"""Training goes on while the disk of its logs stands still."""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.episode import Task
from agentrl.core.whole_lines import WholeLines
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.core.writer_thread import WriterThread
from agentrl.observe.sinks import MetricsWriter, read_metrics
from agentrl.rollout.failed_episodes import failure_counts
from agentrl.rollout.journal import read_episodes
from tests.rollout.instant import Instant

SECONDS = 60  # longest wait for anything; a test that needs it has failed
STEPS = 4


class Mixed(RolloutWorkflow):
    """Answers; every sixth episode fails."""

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        await asyncio.sleep(0)
        llm.session().say(3)  # type: ignore[attr-defined]
        if task.data["n"] % 6 == 0:
            raise RuntimeError("broken")
        return Outcome(reward=float(seed % 2))


class Asked(WriterThread):
    """Tells when it is waited for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked = threading.Event()

    def flush(self, seconds: float | None = None) -> None:
        self.asked.set()
        super().flush(seconds)


def test_steps_are_made_and_a_checkpoint_waits_while_no_log_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, whole, stood = threading.Event(), WholeLines.add_all, threading.Event()

    def standing(self: WholeLines, lines: Sequence[bytes]) -> None:
        stood.set()
        assert let.wait(SECONDS), "the loop stood still while the disk was waited for"
        whole(self, lines)

    monkeypatch.setattr(WholeLines, "add_all", standing)
    writer = Asked("logs")

    async def work() -> dict[str, Any]:
        settings = ("rollout.on_failure=keep", "rollout.max_failure_rate=1")
        world = Instant(tmp_path / "run", Mixed(), *settings, writer=writer)
        metrics = MetricsWriter(tmp_path / "run", tensorboard=False, writer=writer)
        world.controller._write_metrics = metrics.write
        world.controller.start()
        for step in range(STEPS):
            await world.step(step)
        assert await asyncio.to_thread(stood.wait, SECONDS), "the thread may not have had the interpreter yet"
        assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) <= 1, "version 0 was recorded before any episode"
        cutting = asyncio.create_task(world.controller.checkpoint())
        assert await asyncio.to_thread(writer.asked.wait, SECONDS) and not cutting.done()
        let.set()
        await cutting
        steps = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
        assert steps == list(range(STEPS + 1)), "what was logged before a checkpoint is written when it counts"
        await world.controller.close()
        await asyncio.to_thread(writer.close)
        await world.close()
        metrics.close()
        return {one["group_id"]: one for batch in world.batches for one in map(vars, batch.episodes)}

    trained = asyncio.run(work())
    episodes = list(read_episodes(tmp_path / "run" / "episodes.jsonl"))
    places = [(one.group_id, one.index, one.attempt) for one in episodes]
    assert len(set(places)) == len(places) and trained.keys() <= {one.group_id for one in episodes}
    failed = [one for one in episodes if one.failed and one.error]
    assert failed and sum(number for _, number in failure_counts(tmp_path / "run" / "failed-episodes.jsonl")) == len(
        [one for one in failed if one.stop_reason not in ("cancelled", "stale")]
    )
    lines = (tmp_path / "run" / "failed-episodes.jsonl").read_text().splitlines()
    assert [json.loads(line)["count"] for line in lines] == list(range(1, len(lines) + 1)), "in order"
