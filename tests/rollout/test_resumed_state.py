"""A checkpoint holds the search for the bound and the retry budgets of running groups."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from agentrl.core.episode import Task
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.backend import InferenceError
from agentrl.rollout.auto_bound import START, WINDOW, AutoBound
from agentrl.rollout.journal import read_episodes
from tests.rollout.instant import Instant, run_virtually


class Slow(RolloutWorkflow):
    """Says something after ten seconds."""

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        await asyncio.sleep(10.0)
        llm.session().say(3)  # type: ignore[attr-defined]
        return Outcome(reward=float(seed % 2))


class Broken(RolloutWorkflow):
    """Reaches no server."""

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        raise InferenceError("gone")


def test_the_search_for_the_bound_goes_on_after_a_resume(tmp_path: Path) -> None:
    """The trainer waits all the time, so the bound was raised twice, and the second try is not judged yet."""

    async def work() -> None:
        first = Instant(tmp_path / "run", Slow(), "rollout.max_staleness=auto", "trainer.total_steps=50")
        first.controller.start()
        steps = 2 * (START + 2 + WINDOW) + 8
        for step in range(steps):
            await first.step(step)
        before = first.controller._auto
        assert before is not None and before.bound == START + 2 and before._tried and before._waits
        bounds = (before.bound, first.controller.gate.max_staleness, first.controller._bound.state())
        saved = await first.controller.checkpoint()
        await first.close()
        second = Instant(tmp_path / "run", Slow(), "rollout.max_staleness=auto", "trainer.total_steps=50")
        second.controller.restore(steps, saved, recorded=True, evaluated=True)
        after = second.controller._auto
        assert after is not None
        assert bounds == (after.bound, second.controller.gate.max_staleness, second.controller._bound.state())
        assert after.state() | {"settling": 0} == before.state() | {"settling": 0}
        await second.close()

    run_virtually(work())


def test_a_lowered_bound_that_is_not_in_force_yet_comes_into_force_after_a_resume(tmp_path: Path) -> None:
    async def work() -> None:
        first = Instant(tmp_path / "run", Slow(), "rollout.max_staleness=auto")
        first.controller.start()
        await first.step(0)
        first.controller._bound.change(4)
        first.controller._bound.change(2)
        saved = await first.controller.checkpoint()
        await first.close()
        second = Instant(tmp_path / "run", Slow(), "rollout.max_staleness=auto")
        second.controller.restore(1, saved, recorded=True, evaluated=True)
        bound = second.controller._bound
        assert (bound.step, bound.bound) == (1, 4)
        bound.advance(4)
        assert bound.bound == 4
        bound.advance(5)
        assert bound.bound == 2
        await second.close()

    run_virtually(work())


def test_a_restored_search_measures_only_when_the_pipeline_is_full_again() -> None:
    auto = AutoBound(bound=3)
    for _ in range(4 * WINDOW):
        auto.observe(5.0, 10.0)
    assert auto._pauses, "a larger bound did not help"
    auto.observe(5.0, 10.0)
    again = AutoBound.restored(json.loads(json.dumps(auto.state())))
    assert again == replace(auto, _settling=again._settling) and again._settling == auto.bound + 1
    measured = len(again._waits)
    for _ in range(auto.bound + 1):
        assert again.observe(5.0, 10.0) is None and len(again._waits) == measured


def test_a_resume_gives_a_running_group_no_new_retries(tmp_path: Path) -> None:
    """Two of three were spent before the first checkpoint, the third before the second."""
    settings = ("rollout.max_staleness=0", "rollout.retries=3", "rollout.group_size=2", "rollout.batch_size=1")

    async def part(saved: bytes | None) -> tuple[bytes, list[tuple[int, int]]]:
        run = Instant(tmp_path / "run", Broken(), *settings, tasks=[Task(id="train/0", data={})])
        if saved is not None:
            run.controller.restore(0, saved, recorded=True, evaluated=True)
        run.controller.start()
        if saved is not None:
            run.controller.rollouts.served.set()  # as when the trainer has pushed
        await asyncio.sleep(0.1)  # a retry is made after half a second
        spent, found = run.controller.rollouts.retries_spent(), await run.controller.checkpoint()
        await run.close()
        return found, spent

    async def work() -> None:
        saved, spent = await part(None)
        assert spent == [(0, 2)]
        saved, spent = await part(saved)
        assert spent == [(0, 3)]
        await part(saved)

    run_virtually(work())
    tried = [e for e in read_episodes(tmp_path / "run" / "episodes.jsonl") if e.group_id == "g0"]
    assert [(e.index, e.retried) for e in tried] == [
        (0, True), (1, True), (0, True), (1, False), (0, False), (1, False)
    ]  # fmt: skip
