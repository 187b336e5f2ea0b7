"""Rewards that are no numbers: taken where they are one in another shape, else an error with value and function."""

import asyncio
import math
from pathlib import Path

import pytest

from agentrl.core.contract import checked_metrics, finite
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import LLM, Outcome
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from tests.inference.fakes import answer
from tests.rollout.test_episode_runner import ARITHMETIC, Scripted, client, episode_of

GOOD = {
    "1": 1.0, "0.5": 0.5, "numpy.float32(0.5)": 0.5, "numpy.int64(2)": 2.0, "numpy.array(0.25)": 0.25,
    "torch.tensor(0.5)": 0.5, "torch.tensor(3)": 3.0, "fractions.Fraction(1, 4)": 0.25,
}  # fmt: skip
BAD = {
    "float('nan')": "reward nan; want a finite float",
    "float('inf')": "reward inf; want a finite float",
    "numpy.float32('nan')": "reward np.float32(nan); want a finite float",
    "torch.tensor(float('-inf'))": "reward tensor(-inf); want a finite float",
    "10 ** 400": "; want a finite float",
    "[1.0]": "reward [1.0], a list; want a float",
    "[]": "reward [], a list; want a float",
    "torch.tensor([1.0])": "reward tensor([1.]), a Tensor; want a float",
    "numpy.zeros(3)": "reward array([0., 0., 0.]), a ndarray; want a float",
    "'1.0'": "reward '1.0', a str; want a float",
    "True": "reward True, a bool; want a float, float(True)",
    "numpy.bool_(True)": "reward np.True_, a bool; want a float",
    "1j": "reward 1j, a complex; want a float",
    "{'reward': 1.0}": "reward {'reward': 1.0}, a dict; want a float",
}
MISSING = "None"

PARTS = """
import fractions
import numpy
import torch
from agentrl import LanguageEnvironment, SingleTurnEnvironment, ToolEnvironment

ASK = [{{"role": "user", "content": "?"}}]

class Steps(LanguageEnvironment):
    async def reset(self, *, seed=None, options=None):
        return ASK, {{}}
    async def step(self, action):
        return [], {value}, True, False, {{}}

class Judges(SingleTurnEnvironment):
    def prompt(self, task):
        return ASK
    def judge(self, task, answer):
        return {value}

class Pairs(Judges):
    def judge(self, task, answer):
        return {value}, {{"accuracy": 1.0}}

class Tools(ToolEnvironment):
    def prompt(self, task):
        return ASK
    async def reward(self, task, answer):
        return {value}

class Slow(Judges):
    blocking = True

def function(task, messages, reward):
    return {value}
"""
PLACES = {
    "Steps": "Steps.step (parts.py:12) returned ",
    "Judges": "Judges.judge (parts.py:18) returned ",
    "Pairs": "Pairs.judge (parts.py:22) returned ",
    "Tools": "Tools.reward (parts.py:28) returned ",
    "Slow": "Judges.judge (parts.py:18) returned ",
    "function": "function (parts.py:34) returned ",
}


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


async def run(template: ChatTemplate, folder: Path, value: str, place: str) -> Episode:
    file = folder / "parts.py"
    file.write_text(PARTS.format(value=value))
    if place == "function":
        return await episode_of(template, AgentEnvWorkflow(ARITHMETIC, reward=f"{file}:function"))
    return await episode_of(template, AgentEnvWorkflow(f"{file}:{place}"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [*GOOD, *BAD, MISSING])
async def test_a_reward_is_taken_as_a_float_or_refused_with_value_and_function(
    template: ChatTemplate, tmp_path: Path, value: str, place: str
) -> None:
    episode = await run(template, tmp_path, value, place)
    nodes = episode.trajectories["assistant"].nodes
    if value in GOOD:
        assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TERMINATED, GOOD[value], None)
        assert type(episode.reward) is float and all(type(n.reward) is float for n in nodes if n.reward is not None)
    elif value == MISSING:
        assert episode.failed and (episode.stop_reason, episode.reward) == (StopReason.TERMINATED, None)
    else:
        assert episode.failed and (episode.stop_reason, episode.reward) == (StopReason.ENVIRONMENT_ERROR, None)
        assert PLACES[place] in str(episode.error) and BAD[value] in str(episode.error)
        assert not any(node.reward is not None and math.isnan(node.reward) for node in nodes)


async def test_metrics_are_numbers_in_any_shape_or_refused_by_name(template: ChatTemplate, tmp_path: Path) -> None:
    good = await run(template, tmp_path, "(1.0, {'a': torch.tensor(2.0), 'b': numpy.int64(3), 'c': True})", "Judges")
    assert good.metrics == {"a": 2.0, "b": 3.0, "c": 1.0} and {type(v) for v in good.metrics.values()} == {float}
    for number, metrics in enumerate(
        ("0.5", "[1.0]", "{'a': float('nan')}", "{'a': [1.0]}", "{'a': 10 ** 400}", "None")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        bad = await run(template, folder, f"(1.0, {metrics})", "Tools")
        assert bad.stop_reason is StopReason.ENVIRONMENT_ERROR
        assert "Tools.reward (parts.py:28) returned metrics=" in str(bad.error)
    folder = tmp_path / "three"
    folder.mkdir()
    three = await run(template, folder, "(1.0, {}, 2)", "Judges")
    assert "Judges.judge (parts.py:18) returned 3 values; want the reward, or (reward, metrics)" in str(three.error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", [1.0], True, None, 10**400])
async def test_a_workflow_of_ones_own_is_held_to_the_same(template: ChatTemplate, value: object) -> None:
    async def credit(llm: LLM) -> Outcome:
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": "x"}])
        llm.reward(value)  # type: ignore[arg-type]
        return Outcome(reward=1.0)

    credited = await episode_of(template, Scripted(credit))
    assert credited.stop_reason is StopReason.ENVIRONMENT_ERROR and credited.reward is None
    assert "llm.reward(role='assistant') returned reward" in str(credited.error)
    assert all(node.reward is None for node in credited.trajectories["assistant"].nodes)
    returned = await episode_of(template, Scripted(lambda llm: Outcome(reward=value)))  # type: ignore[arg-type]
    assert returned.failed
    if value is not None:
        assert returned.stop_reason is StopReason.ENVIRONMENT_ERROR
        assert "Scripted.arun_episode (test_episode_runner.py:" in str(returned.error)


@pytest.mark.parametrize("returned", [None, 1.0, (1.0, {})])
async def test_what_is_no_outcome_is_named(template: ChatTemplate, returned: object) -> None:
    episode = await episode_of(template, Scripted(lambda llm: returned))
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert f"returned {returned!r}; want an Outcome" in str(episode.error)


async def test_step_rewards_do_not_add_up_to_infinity(template: ChatTemplate) -> None:
    async def credit(llm: LLM) -> Outcome:
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": "x"}])
        llm.reward(1e308)
        llm.reward(1e308)
        return Outcome(reward=1.0)

    assert "returned reward inf" in str((await episode_of(template, Scripted(credit))).error)


def test_long_values_are_shortened_in_the_message() -> None:
    with pytest.raises(TypeError, match=r"^f returned reward \[0\.0, .*\.\.\., a list; want a float") as caught:
        finite([0.0] * 1000, "f")
    assert len(str(caught.value)) < 400
    with pytest.raises(TypeError, match="want a dict of finite numbers"):
        checked_metrics({"a": "x" * 9999}, "f returned metrics")


@pytest.mark.parametrize("env", ["arithmetic", "calculator", "gsm8k", "retry"])
@pytest.mark.parametrize("task", [{"question": "1 + 1?"}, {"question": "1 + 1?", "answer": None},
                                  {"question": "1 + 1?", "answer": ""}])  # fmt: skip
async def test_a_task_without_an_answer_fails_its_episode_and_is_never_a_reward_of_0(
    template: ChatTemplate, env: str, task: dict[str, object]
) -> None:
    script = lambda ids, params: answer([*template.tokenizer.encode("It is 2"), template.eos_id])  # noqa: E731
    episode = await run_episode(
        AgentEnvWorkflow(env), Task(id="t", data=task), client(template, script),
        group_id="g", index=0, seed=0, limits=Limits(60.0, 9.0), left=Abandoned(),
    )  # fmt: skip
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR and episode.reward is None
    assert "answer" in str(episode.error).splitlines()[-1], "the last line, which logs show, says what is missing"


async def test_constant_rewards_end_every_episode(template: ChatTemplate, tmp_path: Path) -> None:
    episodes = await asyncio.gather(*(run(template, tmp_path, "1.0", "Judges") for _ in range(8)))
    assert [(e.stop_reason, e.reward) for e in episodes] == [(StopReason.TERMINATED, 1.0)] * 8
