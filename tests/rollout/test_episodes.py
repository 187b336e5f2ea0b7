"""The episode boundary: exactly one record comes out, whatever went wrong."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.core.agent_env import AgentEnvWorkflow, checked_reward
from agentrl.core.episode import StopReason, Task
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.backend import InferenceError, SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.episodes import run_episode
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


async def episode_of(template: ChatTemplate, workflow: RolloutWorkflow, timeout: float = 60.0, script=None):
    script = script or (lambda ids, params: answer([*template.tokenizer.encode("It is 2"), template.eos_id]))
    return await run_episode(
        workflow, TASK, client(template, script), group_id="g", index=1, seed=5, timeout=timeout
    )  # fmt: skip


async def test_a_right_answer_is_rewarded_on_the_message_that_gave_it(template: ChatTemplate) -> None:
    episode = await episode_of(template, AgentEnvWorkflow(env=ARITHMETIC, agent="agentrl.agents.chat:ChatAgent"))
    assert (episode.reward, episode.metrics, episode.stop_reason) == (1.0, {"accuracy": 1.0}, StopReason.TERMINATED)
    assert not episode.failed
    nodes = episode.trajectories["assistant"].nodes
    assert [node.reward for node in nodes] == [None, 1.0]
    assert episode.oldest_version() == 0


async def test_the_first_of_a_group_tells_how_far_its_ids_drifted(template: ChatTemplate) -> None:
    agent_env = AgentEnvWorkflow(env=ARITHMETIC, agent="agentrl.agents.chat:ChatAgent")
    assert (await episode_of(template, agent_env)).drift == {}, "it costs a render: one of a group is enough"
    said = [*template.tokenizer.encode("It is 2"), template.eos_id]
    first = await run_episode(
        agent_env, TASK, client(template, lambda ids, params: answer(said)),
        group_id="g", index=0, seed=5, timeout=60.0,
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
        "from agentrl.core.environment import SingleTurnEnvironment\n"
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
