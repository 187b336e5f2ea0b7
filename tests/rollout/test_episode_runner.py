"""The episode boundary: exactly one record comes out, whatever went wrong."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.core.columns import Columns
from agentrl.core.contract import checked_reward
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.inference.backend import InferenceError, SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from tests.inference.fakes import FakeBackend, Script, answer

TASK = Task(id="train/0", data={"question": "What is 1 + 1?", "answer": "2"})
ARITHMETIC = "agentrl.envs.arithmetic:Arithmetic"


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def client(template: ChatTemplate, script: Script) -> ChatClient:
    settings = SessionSettings(SamplingParams(max_new_tokens=20), 500, locked=True, model="m")
    return ChatClient(Router([FakeBackend(script)]), template, settings, settings)


class Scripted(RolloutWorkflow):
    """A workflow that does what it is told."""

    def __init__(self, act: Callable[[LLM], object]) -> None:
        self.act = act

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        result = self.act(llm)
        return await result if asyncio.iscoroutine(result) else result  # type: ignore[return-value]


async def episode_of(
    template: ChatTemplate, workflow: RolloutWorkflow, timeout: float = 60.0, script=None,
    close_timeout: float = 9.0, left: Abandoned | None = None,
) -> Episode:  # fmt: skip
    script = script or (lambda ids, params: answer([*template.tokenizer.encode("It is 2"), template.eos_id]))
    return await run_episode(
        workflow, TASK, client(template, script), group_id="g", index=1, seed=5,
        limits=Limits(timeout, close_timeout), left=left if left is not None else Abandoned(),
    )  # fmt: skip


async def test_a_right_answer_is_rewarded_on_the_message_that_gave_it(template: ChatTemplate) -> None:
    episode = await episode_of(template, AgentEnvWorkflow(env=ARITHMETIC, agent="agentrl.agents.chat:ChatAgent"))
    assert (episode.reward, episode.metrics, episode.stop_reason) == (1.0, {"accuracy": 1.0}, StopReason.TERMINATED)
    assert not episode.failed
    nodes = episode.trajectories["assistant"].nodes
    assert [node.reward for node in nodes] == [None, 1.0]
    assert Columns.of([episode]).versions.min() == 0


async def test_the_first_of_a_group_tells_how_far_its_ids_drifted(template: ChatTemplate) -> None:
    agent_env = AgentEnvWorkflow(env=ARITHMETIC, agent="agentrl.agents.chat:ChatAgent")
    assert (await episode_of(template, agent_env)).drift == {}, "it costs a render: one of a group is enough"
    said = [*template.tokenizer.encode("It is 2"), template.eos_id]
    first = await run_episode(
        agent_env, TASK, client(template, lambda ids, params: answer(said)),
        group_id="g", index=0, seed=5, limits=Limits(60.0, 9.0), left=Abandoned(),
    )  # fmt: skip
    assert first.drift == {"special": 0.0, "text": 0.0}


async def test_each_failure_is_typed_has_no_reward_and_keeps_its_reason(template: ChatTemplate) -> None:
    async def hang(llm: LLM) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    def broken(llm: LLM) -> Outcome:
        raise KeyError("price")

    async def refused(llm: LLM) -> Outcome:
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": "x"}])
        raise AssertionError

    def fail(ids: list[int], params: SamplingParams) -> None:
        raise InferenceError("http://fake is gone")

    def overflow(llm: LLM) -> object:
        return llm.session().chat.completions.create(messages=[{"role": "user", "content": "x" * 600}])

    cases = [
        (await episode_of(template, Scripted(hang), timeout=0.01), StopReason.TIMEOUT, "no end within 0.01 s"),
        (await episode_of(template, Scripted(broken)), StopReason.ENVIRONMENT_ERROR, "KeyError: 'price'"),
        (await episode_of(template, Scripted(refused), script=fail), StopReason.INFERENCE_ERROR, "http://fake is gone"),
        (await episode_of(template, Scripted(overflow)), StopReason.CONTEXT_OVERFLOW, "does not fit"),
        (await episode_of(template, Scripted(lambda llm: Outcome(reward=None))), StopReason.TERMINATED, None),
    ]
    for episode, reason, text in cases:
        assert episode.stop_reason == reason
        assert episode.failed and episode.reward is None
        assert text is None or text in (episode.error or "")


@pytest.mark.parametrize(("who", "reason"), [("env", StopReason.ENVIRONMENT_ERROR), ("agent", StopReason.AGENT_ERROR)])
async def test_the_one_that_raised_is_named(
    template: ChatTemplate, tmp_path: Path, who: str, reason: StopReason
) -> None:
    source = tmp_path / "parts.py"
    source.write_text(
        "from agentrl.core.agent import Agent\n"
        "from agentrl.envkit.language import SingleTurnEnvironment\n"
        "class Env(SingleTurnEnvironment):\n"
        "    def prompt(self, task): return [{'role': 'user', 'content': 'x'}]\n"
        "    def judge(self, task, answer): raise RuntimeError('broken judge')\n"
        "class Clumsy(Agent):\n"
        "    async def step(self, observation, info): raise RuntimeError('broken agent')\n"
    )
    agent = f"{source}:Clumsy" if who == "agent" else "agentrl.agents.chat:ChatAgent"
    episode = await episode_of(template, AgentEnvWorkflow(env=f"{source}:Env", agent=agent))
    assert episode.stop_reason == reason
    assert "broken" in (episode.error or "")


async def test_cancelling_the_run_is_not_swallowed(template: ChatTemplate) -> None:
    started = asyncio.Event()

    async def wait(llm: LLM) -> Outcome:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    job = asyncio.create_task(episode_of(template, Scripted(wait)))
    await started.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job


@pytest.mark.parametrize(
    ("reward", "error"), [("1", TypeError), (None, TypeError), (True, TypeError), (float("nan"), ValueError)]
)
def test_a_reward_that_is_no_finite_number_is_an_error(reward: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"str\.step returned reward"):
        checked_reward(reward, "an env")


ENVIRONMENTS = """
from agentrl import LanguageEnvironment

ASK = [{"role": "user", "content": "?"}]

class Base(LanguageEnvironment):
    async def reset(self, *, seed=None, options=None):
        return ASK, {}

class FourValues(Base):
    async def step(self, action):
        return [], 1.0, True, False

class NoInfo(Base):
    async def step(self, action):
        return [], 1.0, True, False, None

class TextReward(Base):
    async def step(self, action):
        return [], "1.0", True, False, {}

class NanReward(Base):
    async def step(self, action):
        return [], float("nan"), True, False, {}

class NumberFlag(Base):
    async def step(self, action):
        return [], 1.0, 1, False, {}

class TextMetric(Base):
    async def step(self, action):
        return [], 1.0, True, False, {"metrics": {"accuracy": "high"}}

class NanMetric(Base):
    async def step(self, action):
        return [], 1.0, True, False, {"metrics": {"accuracy": float("nan")}}

class Exits(Base):
    async def step(self, action):
        raise SystemExit(3)

class OwnLimit(Base):
    async def step(self, action):
        raise TimeoutError("the environment's own")

class Numpy(Base):
    async def step(self, action):
        import numpy
        return [], numpy.float32(0.5), numpy.bool_(True), False, {"metrics": {"n": numpy.int64(2)}}

class ResetAlone(Base):
    async def reset(self, *, seed=None, options=None):
        return ASK
    async def step(self, action):
        return [], 1.0, True, False, {}

class Missing(Base):
    turns = 0
    async def step(self, action):
        self.turns += 1
        return ASK, None if self.turns == 1 else 1.0, self.turns == 2, False, {"metrics": {"turns": self.turns}}

class Counting(Base):
    turns = 0
    async def step(self, action):
        self.turns += 1
        return ASK, float(self.turns), False, self.turns == 3, {}

def judge(task, messages, reward, bonus=0.0):
    return len(messages) + bonus, {"judged": 1.0}

async def unsure(task, messages, reward):
    return None

def text(task, messages, reward):
    return "good"
"""


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    file = tmp_path / "faulty.py"
    file.write_text(ENVIRONMENTS)
    return file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FourValues", r"FourValues\.step (faulty.py:11) returned 4 values; want (observation, reward, "),
        ("NoInfo", r"NoInfo\.step (faulty.py:15) returned info=None; want a dict"),
        ("TextReward", r"TextReward\.step (faulty.py:19) returned reward '1.0', a str; want a float, or None"),
        ("NanReward", r"NanReward\.step (faulty.py:23) returned reward nan; want a finite float"),
        ("NumberFlag", r"NumberFlag\.step (faulty.py:27) returned terminated=1, a int; want a bool"),
        ("TextMetric", r"TextMetric\.step (faulty.py:31) returned info['metrics']={'accuracy': 'high'}"),
        (
            "NanMetric",
            r"NanMetric\.step (faulty.py:35) returned info['metrics']={'accuracy': nan}; want a dict",
        ),
        ("Exits", "SystemExit: 3"),
        ("OwnLimit", "TimeoutError: the environment's own"),
        ("ResetAlone", r"ResetAlone\.reset (faulty.py:52) returned a list; want (observation, info)"),
    ],
)
async def test_a_broken_contract_is_named_with_class_method_and_line(
    template: ChatTemplate, environments: Path, name: str, message: str
) -> None:
    episode = await episode_of(template, AgentEnvWorkflow(f"{environments}:{name}"))
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR and episode.reward is None
    assert message.replace("\\", "") in str(episode.error)


async def test_a_missing_step_reward_leaves_the_episode_without_one(template: ChatTemplate, environments: Path) -> None:
    episode = await episode_of(template, AgentEnvWorkflow(f"{environments}:Missing"))
    assert (episode.reward, episode.stop_reason, episode.error) == (None, StopReason.TERMINATED, None)
    assert episode.failed and episode.metrics == {"turns": 2.0}


async def test_numpys_numbers_are_taken_and_become_plain_ones(template: ChatTemplate, environments: Path) -> None:
    episode = await episode_of(template, AgentEnvWorkflow(f"{environments}:Numpy"))
    assert (episode.reward, episode.stop_reason, episode.metrics) == (0.5, StopReason.TERMINATED, {"n": 2.0})
    assert type(episode.trajectories["assistant"].nodes[-1].reward) is float
    json.loads(episode.model_dump_json())


async def test_an_outcome_that_is_none_is_a_failed_episode(template: ChatTemplate) -> None:
    for metrics in ({"a": "b"}, {1: 2.0}, {"a": float("inf")}):
        episode = await episode_of(template, Scripted(lambda llm: Outcome(reward=1.0, metrics=metrics)))  # noqa: B023
        assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR and episode.reward is None
        assert "metrics" in str(episode.error)


async def test_a_reward_function_that_does_not_fit_is_refused_at_once(environments: Path) -> None:
    with pytest.raises(TypeError, match=r"reward\.id=.*want a function of \(task, messages, reward\)"):
        AgentEnvWorkflow(f"{environments}:Counting", reward=f"{environments}:judge", reward_kwargs={"bonuss": 1})
    with pytest.raises(TypeError, match="not a callable"):
        AgentEnvWorkflow(f"{environments}:Counting", reward=f"{environments}:ASK")
    with pytest.raises(TypeError, match=r"agent\.id=tool_loop with agent\.kwargs=\{\}.*tools"):
        AgentEnvWorkflow(f"{environments}:Counting", agent="tool_loop")


async def test_step_rewards_and_the_kind_of_end_are_kept(template: ChatTemplate, environments: Path) -> None:
    episode = await episode_of(template, AgentEnvWorkflow(f"{environments}:Counting"))
    assert (episode.reward, episode.stop_reason) == (6.0, StopReason.TRUNCATED)
    nodes = episode.trajectories["assistant"].nodes
    assert [node.reward for node in nodes if any(node.loss_mask)] == [1.0, 2.0, 3.0]


async def test_a_reward_function_judges_instead_of_the_environment(template: ChatTemplate, environments: Path) -> None:
    workflow = AgentEnvWorkflow(
        f"{environments}:Counting", reward=f"{environments}:judge", reward_kwargs={"bonus": 0.5}
    )  # fmt: skip
    episode = await episode_of(template, workflow)
    assert (episode.reward, episode.metrics) == (7.5, {"judged": 1.0})
    nodes = episode.trajectories["assistant"].nodes
    assert sum(node.reward or 0 for node in nodes) == 7.5
    unsure = await episode_of(template, AgentEnvWorkflow(f"{environments}:Counting", reward=f"{environments}:unsure"))
    assert unsure.reward is None and unsure.error is None
    text = await episode_of(template, AgentEnvWorkflow(f"{environments}:Counting", reward=f"{environments}:text"))
    assert "text (faulty.py:75) returned reward 'good', a str" in str(text.error)
