"""How whole episodes end: cut answers, a full context, and what the environment and the reward function say then."""

import json
from pathlib import Path

import pytest

from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.evaluate.metrics import summarize
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.buffer import Group
from agentrl.rollout.group_account import Tally, judge, step_metrics
from agentrl.rollout.rollout_metrics import batch_metrics
from agentrl.train.batch import Batch
from tests.inference.fakes import Script, answer
from tests.rollout.test_episode_runner import ARITHMETIC, Scripted, episode_of

ENVIRONMENTS = '''
from agentrl import LanguageEnvironment, SingleTurnEnvironment, ToolEnvironment, tool
from agentrl.wrappers import ScaleReward, TimeLimit

LONG = [{"role": "user", "content": "x" * 150}]

class Talks(LanguageEnvironment):
    """Each step earns 0.25 and says so much that the third or fourth prompt does not fit."""
    async def reset(self, *, seed=None, options=None):
        self.steps = 0
        return LONG, {}
    async def step(self, action):
        self.steps += 1
        return LONG, 0.25, False, False, {"metrics": {"steps": self.steps}}

class Judges(Talks):
    async def judge_unfinished(self):
        return -1.0, {"metrics": {"accuracy": 0.0, "seen": self.steps}}

class Unsure(Talks):
    async def judge_unfinished(self):
        return None, {}

class Broken(Talks):
    async def judge_unfinished(self):
        return float("nan"), {}

class Huge(Talks):
    async def reset(self, *, seed=None, options=None):
        return LONG * 9, {}

class Shop(ToolEnvironment):
    def prompt(self, task):
        return LONG
    def reward(self, task, answer):
        return float(answer == "9") - 0.5, {"accuracy": float(answer == "9")}

class Asks(SingleTurnEnvironment):
    def prompt(self, task):
        return LONG
    def judge(self, task, answer):
        return float(bool(answer)), {"accuracy": float(bool(answer))}

def make_scaled():
    return TimeLimit(ScaleReward(Judges(), 10.0), 99)

def counts(task, messages, reward):
    return 2.0 if reward == -0.25 else 7.0, {"messages": len(messages)}
'''


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "endings.py"
    path.write_text(ENVIRONMENTS)
    return path


def cut(ids: list[int], params: SamplingParams) -> Generation:
    return answer([7, 8, 9], finish="length")


async def test_a_cut_answer_is_judged_and_counts_as_cut_everywhere(template: ChatTemplate) -> None:
    """A single-turn environment terminates after any answer; nothing but the finish reason tells that it was cut."""
    said = await episode_of(template, AgentEnvWorkflow(ARITHMETIC))
    lost = await episode_of(template, AgentEnvWorkflow(ARITHMETIC), script=cut)
    assert (said.stop_reason, lost.stop_reason) == (StopReason.TERMINATED, StopReason.LENGTH)
    assert not lost.failed and (lost.reward, lost.metrics) == (0.0, {"accuracy": 0.0})
    assert json.loads(lost.model_dump_json())["stop_reason"] == "length"
    columns = Columns.of([said, lost])
    metrics = batch_metrics([Group(0, columns, Tally("kept"))], 0, RewardConfig())
    assert (metrics["rollout/truncated"], metrics["tokens/truncated"]) == (0.5, 0.5)
    assert (metrics["rollout/ended_length"], metrics["rollout/ended_terminated"]) == (0.5, 0.5)
    assert (metrics["rollout/reward_truncated"], metrics["rollout/reward_finished"]) == (lost.reward, said.reward)
    alone = batch_metrics([Group(0, Columns.of([said]), Tally("kept"))], 0, RewardConfig())
    assert "rollout/reward_truncated" not in alone and alone["rollout/reward_finished"] == said.reward
    assert summarize([said, lost]).as_metrics()["eval/truncated"] == 0.5
    assert len(Batch(columns, TrainerConfig()).train_batch().branches) == 2
    assert len(Batch(columns, TrainerConfig(preset="dapo")).train_batch().branches) == 1


async def overflow(template: ChatTemplate, env: str, **settings: object) -> Episode:
    return await episode_of(template, AgentEnvWorkflow(env, **settings))  # type: ignore[arg-type]


async def test_out_of_context_keeps_what_the_steps_earned(template: ChatTemplate, file: Path) -> None:
    episode = await overflow(template, f"{file}:Talks")
    steps = episode.metrics["steps"]
    assert steps >= 2 and episode.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert not episode.failed and episode.reward == 0.25 * steps
    nodes = episode.trajectories["assistant"].nodes
    assert sum(node.reward or 0.0 for node in nodes) == episode.reward
    assert not any(nodes[-1].loss_mask), "the prompt that did not fit stays in the record"
    solved = episode.model_copy(update={"metrics": {"accuracy": 1.0}, "stop_reason": StopReason.TERMINATED})
    metrics = batch_metrics([Group(0, Columns.of([episode, solved]), Tally("kept"))], 0, RewardConfig())
    assert metrics["rollout/ended_context_overflow"] == 0.5
    tally = judge([episode, solved], RolloutConfig(group_size=2), RewardConfig())
    assert (step_metrics([tally])["metrics/accuracy"], tally.solve_rate) == (0.5, 0.5), "wrong, not missing"


async def test_the_environment_judges_what_is_unfinished(template: ChatTemplate, file: Path) -> None:
    episode = await overflow(template, f"{file}:Judges")
    steps = episode.metrics["steps"]
    assert episode.reward == 0.25 * steps - 1.0
    assert episode.metrics == {"accuracy": 0.0, "seen": steps, "steps": steps}
    sampled = [node for node in episode.trajectories["assistant"].nodes if any(node.loss_mask)]
    assert [node.reward for node in sampled] == [0.25] * (len(sampled) - 1) + [-0.75], "credit goes to the last answer"
    unsure = await overflow(template, f"{file}:Unsure")
    assert unsure.failed and unsure.error is None and unsure.stop_reason is StopReason.CONTEXT_OVERFLOW
    broken = await overflow(template, f"{file}:Broken")
    assert broken.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "Broken.judge_unfinished (endings.py:25) returned reward nan" in str(broken.error)


async def test_wrappers_pass_on_what_is_unfinished_and_change_its_reward(template: ChatTemplate, file: Path) -> None:
    plain, scaled = [await overflow(template, f"{file}:{name}") for name in ("Judges", "make_scaled")]
    assert plain.reward is not None and scaled.reward == 10.0 * plain.reward
    assert scaled.metrics == plain.metrics


async def test_a_workflow_that_allows_no_further_turn_has_the_environment_judge(
    template: ChatTemplate, file: Path
) -> None:
    episode = await overflow(template, f"{file}:Judges", max_turns=1)
    assert (episode.stop_reason, episode.reward) == (StopReason.TRUNCATED, 0.25 - 1.0)
    assert episode.metrics["accuracy"] == 0.0


async def test_no_answer_is_judged_as_an_empty_one(template: ChatTemplate, file: Path) -> None:
    """An agent with tools of its own fills the context before it answers the environment."""
    agent = file.with_name("agents.py")
    agent.write_text(
        "from agentrl.agents.chat import ChatAgent\n"
        "class Rambles(ChatAgent):\n"
        "    async def step(self, observation, info):\n"
        "        while True:\n"
        "            await super().step(observation, info)\n"
    )
    for name, reward in (("Asks", 0.0), ("Shop", -0.5)):
        episode = await overflow(template, f"{file}:{name}", agent=f"{agent}:Rambles")
        assert (episode.stop_reason, episode.reward) == (StopReason.CONTEXT_OVERFLOW, reward)
        assert episode.metrics["accuracy"] == 0.0 and not episode.failed


async def test_a_reward_function_judges_an_overflowed_episode(template: ChatTemplate, file: Path) -> None:
    episode = await overflow(template, f"{file}:Judges", reward=f"{file}:counts")
    earned = 0.25 * episode.metrics["steps"] - 1.0
    assert episode.reward == (2.0 if earned == -0.25 else 7.0) and episode.metrics["messages"] > 3
    nodes = episode.trajectories["assistant"].nodes
    assert sum(node.reward or 0.0 for node in nodes) == episode.reward


async def test_a_first_prompt_that_does_not_fit_is_a_failure(template: ChatTemplate, file: Path) -> None:
    episode = await overflow(template, f"{file}:Huge")
    assert episode.failed and (episode.stop_reason, episode.reward) == (StopReason.CONTEXT_OVERFLOW, None)
    assert "does not fit inference.context_length=500" in str(episode.error)


async def test_a_workflow_of_ones_own_keeps_its_step_rewards(template: ChatTemplate) -> None:
    async def fill(llm) -> object:  # type: ignore[no-untyped-def]
        messages = [{"role": "user", "content": "x"}]
        while True:
            reply = await llm.session().chat.completions.create(messages=messages)
            llm.reward(0.5)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "y" * 100}]

    script: Script = lambda ids, params: answer([*template.tokenizer.encode("It is 2"), template.eos_id])  # noqa: E731
    episode = await episode_of(template, Scripted(fill), script=script)
    sampled = sum(any(node.loss_mask) for node in episode.trajectories["assistant"].nodes)
    assert (episode.stop_reason, episode.reward) == (StopReason.CONTEXT_OVERFLOW, 0.5 * sampled)
    assert not episode.failed and "does not fit" in str(episode.error)
