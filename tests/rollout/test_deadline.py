"""An episode has a hard bound, whatever user code does: it ends, is cut, or is abandoned, and all of it is counted."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.recipe import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import LLM, Outcome
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.inference.backend import InferenceError
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.controller import Controller
from agentrl.rollout.deadline import Limits, within
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.group_account import judge, step_metrics
from agentrl.rollout.stop_rules import too_many
from tests.inference.fakes import answer
from tests.rollout.test_controller import Harness, settle
from tests.rollout.test_episode_runner import Scripted, client, episode_of

SHORT = 0.02  # seconds that a deadline is let pass
LONG = 60.0  # seconds that no test waits

ENVIRONMENTS = """
import asyncio
from agentrl import LanguageEnvironment

ASK = [{"role": "user", "content": "?"}]

class Base(LanguageEnvironment):
    started = False
    async def reset(self, *, seed=None, options=None):
        self.started = True
        return ASK, {}
    async def step(self, action):
        return [], 1.0, True, False, {}

class CloseHangs(Base):
    async def close(self):
        if self.started:
            await asyncio.Event().wait()

class CloseRaises(Base):
    async def close(self):
        if self.started:
            raise OSError("the container is gone")

class CloseSwallows(Base):
    async def close(self):
        while self.started:
            try:
                await asyncio.Event().wait()
            except BaseException:
                continue

class StepSwallows(Base):
    async def step(self, action):
        while True:
            try:
                await asyncio.Event().wait()
            except BaseException:
                continue

class StepHangsAndCloseToo(CloseHangs):
    async def step(self, action):
        await asyncio.Event().wait()

class StepHangs(CloseRaises):
    async def step(self, action):
        await asyncio.Event().wait()

class ResetHangs(Base):
    async def reset(self, *, seed=None, options=None):
        await asyncio.Event().wait()

class TurnsCancellationIntoAResult(Base):
    async def step(self, action):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return [], 1.0, True, False, {}

class CancelsItself(Base):
    async def step(self, action):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

class LeaksACancellation(Base):
    async def step(self, action):
        other = asyncio.ensure_future(asyncio.sleep(60))
        other.cancel()
        await other

class Panics(Base):
    async def step(self, action):
        raise type("PanicException", (BaseException,), {})("a library written in Rust")
"""


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    file = tmp_path / "stubborn.py"
    file.write_text(ENVIRONMENTS)
    return file


async def run(
    template: ChatTemplate, environments: Path, name: str, timeout: float, close_timeout: float
) -> tuple[Episode, Abandoned]:
    left = Abandoned()
    workflow = AgentEnvWorkflow(f"{environments}:{name}", close_timeout=close_timeout)
    return await episode_of(template, workflow, timeout, close_timeout=close_timeout, left=left), left


@pytest.mark.parametrize("name", ["StepSwallows", "CloseSwallows"])
async def test_a_task_that_swallows_its_cancellation_is_abandoned_and_says_where(
    template: ChatTemplate, environments: Path, name: str
) -> None:
    episode, left = await run(template, environments, name, SHORT, SHORT)
    assert (episode.stop_reason, episode.reward, episode.abandoned) == (StopReason.TIMEOUT, None, True)
    where = f"{name}.{name[:5].lower().removesuffix('s')}"
    line = str(episode.error).splitlines()[-1]
    assert line.startswith(f"no end within {SHORT:g} s (rollout.episode_timeout), in ") and where in line
    assert "runs on: its task was abandoned" in line and "(rollout.close_timeout)" in line and "stubborn.py:" in line
    assert len(left) == 1


async def test_a_close_that_hangs_after_a_timeout_is_cut_and_counted(
    template: ChatTemplate, environments: Path
) -> None:
    episode, left = await run(template, environments, "StepHangsAndCloseToo", SHORT, SHORT)
    assert (episode.stop_reason, episode.reward, episode.abandoned) == (StopReason.TIMEOUT, None, True)
    assert "StepHangsAndCloseToo.step (stubborn.py:" in str(episode.error)
    assert "was cut, in CloseHangs.close (stubborn.py:" in str(episode.error)
    assert len(left) == 0, "its task has ended"


async def test_a_close_that_hangs_after_the_end_is_cut_and_costs_no_reward(
    template: ChatTemplate, environments: Path
) -> None:
    episode, left = await run(template, environments, "CloseHangs", LONG, SHORT)
    assert (episode.stop_reason, episode.reward, episode.abandoned) == (StopReason.TERMINATED, 1.0, True)
    assert "CloseHangs.close (stubborn.py:" in str(episode.error) and "rollout.close_timeout" in str(episode.error)
    assert not episode.failed and len(left) == 0


async def test_a_close_that_raises_costs_no_reward_and_hides_no_failure(
    template: ChatTemplate, environments: Path
) -> None:
    episode, _ = await run(template, environments, "CloseRaises", LONG, LONG)
    assert (episode.stop_reason, episode.reward, episode.abandoned) == (StopReason.TERMINATED, 1.0, False)
    assert "CloseRaises.close (stubborn.py:21) raised:" in str(episode.error)
    assert "the container is gone" in str(episode.error)
    late, _ = await run(template, environments, "StepHangs", SHORT, LONG)
    assert late.stop_reason is StopReason.TIMEOUT and not late.abandoned
    assert "the container is gone" in str(late.error) and "StepHangs.step (stubborn.py:" in str(late.error)


@pytest.mark.parametrize("name", ["ResetHangs", "TurnsCancellationIntoAResult"])
async def test_a_deadline_that_passed_is_a_timeout(template: ChatTemplate, environments: Path, name: str) -> None:
    episode, left = await run(template, environments, name, SHORT, LONG)
    assert (episode.stop_reason, episode.reward, episode.abandoned) == (StopReason.TIMEOUT, None, False)
    assert f"{name}." in str(episode.error) and len(left) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CancelsItself", "cancelled the episode's task"),
        ("LeaksACancellation", "CancelledError"),
        ("Panics", "PanicException: a library written in Rust"),
    ],
)
async def test_whatever_user_code_raises_fails_one_episode(
    template: ChatTemplate, environments: Path, name: str, text: str
) -> None:
    episode, left = await run(template, environments, name, LONG, LONG)
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR and text in str(episode.error)
    assert len(left) == 0


async def test_an_agents_reset_that_hangs_is_a_timeout(template: ChatTemplate, tmp_path: Path) -> None:
    file = tmp_path / "hanging.py"
    file.write_text(
        "import asyncio\n"
        "from agentrl.agents.chat import ChatAgent\n"
        "class Hanging(ChatAgent):\n"
        "    async def reset(self, **_):\n"
        "        await asyncio.Event().wait()\n"
    )
    workflow = AgentEnvWorkflow("agentrl.envs.arithmetic:Arithmetic", agent=f"{file}:Hanging")
    episode = await episode_of(template, workflow, SHORT)
    assert episode.stop_reason is StopReason.TIMEOUT and "Hanging.reset (hanging.py:5)" in str(episode.error)


class Stubborn:
    """A workflow's code that goes on after it was cancelled, until it is told to go on."""

    def __init__(self, then: Callable[[LLM], Awaitable[object]]) -> None:
        self.go = asyncio.Event()
        self.over = asyncio.Event()
        self.then = then
        self.late: object = None

    async def __call__(self, llm: LLM) -> Outcome:
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": "x"}])
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                continue
        try:
            self.late = await self.then(llm)
        except Exception as error:
            self.late = error
            raise
        finally:
            self.over.set()
        return Outcome(reward=1.0)


async def test_what_an_abandoned_task_does_later_changes_nothing_and_prints_nothing(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentrl.inference.client.REFUSAL_SECONDS", 0.0)

    async def calls(llm: LLM) -> object:
        return await llm.session().chat.completions.create(messages=[{"role": "user", "content": "late"}])

    async def rewards(llm: LLM) -> None:
        llm.reward(1.0)

    async def raises(llm: LLM) -> None:
        raise KeyError("late")

    async def returns(llm: LLM) -> None:
        return None

    gc.collect()  # what earlier tests left behind
    caplog.set_level(logging.DEBUG)
    for then, expected in ((calls, InferenceError), (rewards, InferenceError), (raises, KeyError), (returns, None)):
        stubborn, left = Stubborn(then), Abandoned()
        episode = await episode_of(template, Scripted(stubborn), SHORT, close_timeout=SHORT, left=left)
        before = episode.model_dump()
        assert episode.abandoned and len(left) == 1
        stubborn.go.set()
        await stubborn.over.wait()
        await settle()
        assert len(left) == 0 and (expected is None or isinstance(stubborn.late, expected))
        assert episode.model_dump() == before and len(before["trajectories"]["assistant"]["nodes"]) == 2
        gc.collect()
    assert not [
        record for record in caplog.records if "never retrieved" in record.message and "httpx" not in record.message
    ]


async def test_an_answer_that_arrives_after_the_episodes_end_is_dropped(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of the agent's own goes on to wait for it."""
    monkeypatch.setattr("agentrl.inference.client.REFUSAL_SECONDS", 0.0)
    said, own = asyncio.Event(), []
    model = client(template, lambda ids, params: answer([5, 6]))
    (backend,) = model.router.backends
    backend.held = said  # type: ignore[attr-defined]

    async def play(llm: LLM) -> Outcome:
        ask = llm.session().chat.completions.create(messages=[{"role": "user", "content": "x"}])
        own.append(asyncio.create_task(ask))
        await asyncio.sleep(0)
        return Outcome(reward=1.0)

    llm, release = model.acquire(evaluation=False, seed=0)
    await play(llm)
    release()
    before = llm.trajectories()["assistant"].nodes
    said.set()
    with pytest.raises(InferenceError, match="the episode is over"):
        await own[0]
    assert len(before) == 1 and len(llm.trajectories()["assistant"].nodes) == 1


async def test_cancelling_the_run_waits_no_longer_than_a_teardown_may_take() -> None:
    left, stubborn, started = Abandoned(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue

    job = asyncio.create_task(within(Limits(LONG, SHORT), work(), left))
    await started.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert len(left) == 1
    stubborn.set()
    await settle()
    assert len(left) == 0


async def test_the_end_of_the_process_cancels_all_tasks_and_a_teardown_still_gets_its_time() -> None:
    left, closed, started = Abandoned(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            closed.set()

    job = asyncio.create_task(within(Limits(LONG, LONG), work(), left))
    await started.wait()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert closed.is_set() and len(left) == 0


class Holds:
    """Workflow whose episodes swallow every cancellation until they are let go."""

    def __init__(self, which: Callable[[Task], bool]) -> None:
        self.which, self.go = which, asyncio.Event()

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": task.id}])
        while self.which(task) and not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                continue
        return Outcome(reward=float(seed % 97))


def harness(tmp_path: Path, tiny_model: Path, holds: Holds, *overrides: str) -> tuple[Harness, Controller]:
    limits = (f"rollout.episode_timeout={SHORT}", f"rollout.close_timeout={SHORT}")
    made = Harness(tmp_path, tiny_model, *limits, *overrides)
    made.controller.rollouts.episodes.workflow = holds  # type: ignore[assignment]
    return made, made.controller


async def test_training_goes_on_beside_abandoned_episodes_and_counts_them(tiny_model: Path, tmp_path: Path) -> None:
    holds = Holds(lambda task: task.data["n"] == 0)
    made, controller = harness(tmp_path, tiny_model, holds, "rollout.max_failure_rate=1.0", "rollout.batch_size=5")
    try:
        controller.start()
        while not controller._account.uncounted:
            await asyncio.sleep(SHORT)
        await controller.next_batch(0)
        await made.publish(1)
        metrics = made.written[-1][1]
        groups = metrics["rollout/groups_failed"]
        assert groups >= 1 and metrics["rollout/groups_kept"] == 5
        assert metrics["rollout/abandoned"] == metrics["rollout/failed_timeout"] == 3 * groups
        assert controller.rollouts.episodes.abandoned >= 3
        await controller.close()
    finally:
        holds.go.set()


async def test_too_many_abandoned_episodes_end_the_run_with_a_diagnosis(tiny_model: Path, tmp_path: Path) -> None:
    holds = Holds(lambda task: True)
    limits = ("rollout.max_failure_rate=1.0", "rollout.max_concurrent=6", "rollout.batch_size=9")
    _, controller = harness(tmp_path, tiny_model, holds, *limits)
    try:
        controller.start()
        with pytest.raises(RolloutError, match=r"(?s)6 episodes were abandoned and still run.*CancelledError"):
            await controller.next_batch(0)
        await controller.close()
    finally:
        holds.go.set()


def test_a_run_stops_at_as_many_abandoned_tasks_as_it_runs_at_a_time() -> None:
    config = RolloutConfig(max_concurrent=4)
    assert too_many(3, config) is None and "rollout.max_concurrent=4" in str(too_many(4, config))


def test_the_count_is_of_all_drawn_episodes() -> None:
    def ended(index: int, **more: Any) -> Episode:
        return Episode(group_id="g", task_id="t", index=index, seed=0, **more)

    one = ended(0, reward=1.0, stop_reason=StopReason.TERMINATED, abandoned=True)
    other = ended(1, stop_reason=StopReason.TIMEOUT, abandoned=True)
    good = [ended(index, reward=0.0, stop_reason=StopReason.TERMINATED) for index in (2, 3)]
    recipe = RolloutConfig(group_size=4)
    metrics = step_metrics([judge([one, other, *good], recipe, RewardConfig())])
    assert (metrics["rollout/abandoned"], metrics["rollout/failed"]) == (2.0, 1.0)


async def test_what_an_episode_waits_for_others_is_added_to_its_time() -> None:
    start = asyncio.get_running_loop().time()

    def elapsed() -> float:
        return asyncio.get_running_loop().time() - start

    waiting = await within(Limits(SHORT, LONG), asyncio.sleep(5 * SHORT), Abandoned(), elapsed)
    assert not waiting.overdue and waiting.job.done()
    own = await within(Limits(SHORT, LONG), asyncio.sleep(LONG), Abandoned(), lambda: 2 * SHORT)
    assert "no end within 0.02 s" in own.overdue
