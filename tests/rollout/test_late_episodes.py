"""Episodes whose time is over: judged where the environment can, and failed where it cannot."""

import asyncio
from pathlib import Path

import pytest

from agentrl.config.recipe import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.evaluate.metrics import summarize
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.buffer import Group
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.rollout.group_account import judge
from agentrl.rollout.rollout_metrics import batch_metrics
from tests.inference.fakes import FakeBackend, answer
from tests.rollout.instant import run_virtually
from tests.rollout.test_episode_runner import client

TASK = Task(id="train/0", data={})
ENVIRONMENTS = '''
import asyncio
from agentrl import LanguageEnvironment

ASK = [{"role": "user", "content": "?"}]

class Counts(LanguageEnvironment):
    """Each step earns 0.25."""
    opened = closed = 0
    async def reset(self, *, seed=None, options=None):
        self.steps = 0
        type(self).opened += 1
        return ASK, {}
    async def step(self, action):
        self.steps += 1
        return ASK, 0.25, False, False, {"metrics": {"steps": self.steps}}
    async def judge_unfinished(self):
        return -1.0, {"metrics": {"accuracy": 0.0, "seen": self.steps}}
    async def close(self):
        await asyncio.sleep(0)
        type(self).closed += 1

class Unsure(Counts):
    async def judge_unfinished(self):
        return None, {}

class JudgesForEver(Counts):
    async def judge_unfinished(self):
        await asyncio.Event().wait()

class HangsInAStep(Counts):
    async def step(self, action):
        await super().step(action)
        if self.steps == 2:
            await asyncio.Event().wait()
        return ASK, 0.25, False, False, {}

class Ends(Counts):
    async def step(self, action):
        return [], 1.0, True, False, {}
    async def close(self):
        await asyncio.sleep(1)
        type(self).closed += 1
'''


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "late.py"
    path.write_text(ENVIRONMENTS)
    return path


class Slow(FakeBackend):
    """Takes a second for an answer, and for ever from a certain one on."""

    def __init__(self, answers: int) -> None:
        super().__init__(lambda ids, params: answer([5, 6]))
        self.answers = answers
        self.aborted = 0

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        try:
            await asyncio.sleep(1 if len(self.requests) < self.answers else 1e9)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return await super().generate(token_ids, params, request_id=request_id)


def play(template: ChatTemplate, env: str, *, answers: int = 3, judge_late: bool = True, stop: float = 0) -> Episode:
    """Runs an episode with ten seconds, under a virtual clock; ``stop`` cancels it."""
    model = client(template, lambda ids, params: answer([5]))
    backend = Slow(answers)
    model.router._servers = type(model.router)([backend])._servers
    kept: list[Episode] = []

    async def work() -> Episode:
        episode = run_episode(
            AgentEnvWorkflow(env), TASK, model, group_id="g", index=1, seed=5, limits=Limits(10.0, 4.0),
            left=Abandoned(), judge_late=judge_late, cancelled=kept.append,
        )  # fmt: skip
        if not stop:
            return await episode
        job = asyncio.create_task(episode)
        await asyncio.sleep(stop)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        return kept[0]

    found = run_virtually(work())
    assert [status.sessions for status in model.router.status()] == [0]
    return found


def test_what_there_is_is_judged_and_counts_as_cut(template: ChatTemplate, file: Path) -> None:
    late = play(template, f"{file}:Counts")
    assert (late.stop_reason, late.reward, late.failed) == (StopReason.TIMEOUT, 3 * 0.25 - 1.0, False)
    assert late.metrics == {"steps": 3.0, "accuracy": 0.0, "seen": 3.0}
    assert "no end within 10 s (rollout.episode_timeout)" in str(late.error) and late.seconds == pytest.approx(10)
    tally = judge([late, late], RolloutConfig(group_size=2), RewardConfig())
    assert tally.outcome == "kept" and tally.cut == (True, True) and not tally.failures and tally.solve_rate == 0
    metrics = batch_metrics([Group(0, Columns.of([late]), tally)], 0, RewardConfig())
    assert metrics["rollout/truncated"] == metrics["rollout/ended_timeout"] == 1.0
    assert summarize([late]).as_metrics()["eval/truncated"] == 1.0


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("Counts", {"judge_late": False}),
        ("Counts", {"answers": 0}),  # nothing was sampled
        ("HangsInAStep", {}),
        ("Unsure", {}),
        ("JudgesForEver", {}),
    ],
)
def test_what_cannot_be_judged_has_failed(template: ChatTemplate, file: Path, env: str, settings: dict) -> None:
    late = play(template, f"{file}:{env}", **settings)
    assert (late.stop_reason, late.reward, late.failed) == (StopReason.TIMEOUT, None, True)
    assert judge([late], RolloutConfig(group_size=1), RewardConfig()).failures == {"timeout": 1}


def test_a_cancelled_episode_is_not_judged_and_leaves_a_record(template: ChatTemplate, file: Path) -> None:
    gone = play(template, f"{file}:Counts", stop=3.5)
    assert (gone.stop_reason, gone.reward, gone.failed) == (StopReason.CANCELLED, None, True)
    assert sum(any(node.loss_mask) for node in gone.trajectories["assistant"].nodes) == 3


def test_an_environment_that_is_cancelled_while_it_closes_is_closed_once_more(
    template: ChatTemplate, file: Path
) -> None:
    from agentrl.core.registry import load

    play(template, f"{file}:Ends", stop=1.5)
    env = load("env", f"{file}:Ends")
    assert (env.opened, env.closed) == (1, 2), "once when it was made as a test, and once after the cancelled close"
