"""Tests that a role's own reward is recorded, counts for that role alone, and is seen by filters and metrics."""

import json
from pathlib import Path

import pytest

from agentrl.config.baseline import check_tags
from agentrl.config.errors import DataError
from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason, Task, Trajectory
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.evaluate.metrics import summarize
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.buffer import Group
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.rollout.group_account import Tally, is_uniform, judge, step_metrics
from agentrl.rollout.journal import Journal
from agentrl.rollout.rollout_metrics import batch_metrics
from agentrl.train.batch import Batch
from tests.inference.fakes import answer
from tests.rollout.test_controller import Harness, episodes_of
from tests.rollout.test_episode_runner import Scripted, client, episode_of
from tests.train.test_batch import episode

SEEN = RewardConfig()


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


async def speak(llm: LLM, *roles: str) -> None:
    for role in roles:
        await llm.session(role).chat.completions.create(messages=[{"role": "user", "content": "your move"}])


async def test_a_credited_role_has_the_sum_of_its_own_rewards_and_the_others_share(template: ChatTemplate) -> None:
    async def play(llm: LLM) -> Outcome:
        await speak(llm, "white", "black", "scribe")
        llm.reward(0.25, role="white")
        await speak(llm, "white")
        llm.reward(0.75, role="white")
        llm.reward(-1.0, role="black")
        return Outcome(reward=0.5)

    found = await episode_of(template, Scripted(play))
    assert found.role_rewards == {"white": 1.0, "black": -1.0} and found.reward == 0.5
    assert [found.reward_of(role) for role in ("white", "black", "scribe")] == [1.0, -1.0, 0.5]
    assert [node.reward for node in found.trajectories["white"].nodes if any(node.loss_mask)] == [0.25, 0.75]


async def test_a_workflow_may_give_each_role_the_reward_of_the_episode(template: ChatTemplate) -> None:
    async def play(llm: LLM) -> Outcome:
        await speak(llm, "white", "black")
        llm.reward(0.25, role="white")
        return Outcome(reward=0.0, rewards={"white": 2.0, "black": -2.0})

    found = await episode_of(template, Scripted(play))
    assert found.role_rewards == {"white": 2.0, "black": -2.0}
    again = Columns.from_bytes(Columns.of([found]).to_bytes())[0]
    assert again.episodes[0].role_rewards == found.role_rewards
    batch = Batch(again, TrainerConfig(advantage="reward", scale_rewards="none")).train_batch()
    assert set(batch.tokens.sampled["advantages"].tolist()) == {2.0, -2.0}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [({"wihte": 1.0}, "role 'wihte', but the episode's roles are: white"), ({"white": float("nan")}, "finite")],
)
async def test_a_reward_of_an_unknown_role_or_not_a_number_is_refused(
    rewards: dict[str, float], message: str, template: ChatTemplate
) -> None:
    async def play(llm: LLM) -> Outcome:
        await speak(llm, "white")
        return Outcome(reward=0.0, rewards=rewards)

    found = await episode_of(template, Scripted(play))
    assert found.failed and found.stop_reason is StopReason.ENVIRONMENT_ERROR and message in str(found.error)


async def test_a_reward_goes_to_the_sample_that_was_acted_on(template: ChatTemplate, tmp_path: Path) -> None:
    """The agent asks for three samples and acts on the first; a message that is none of them is the last one's."""
    file = tmp_path / "choosing.py"
    file.write_text(CHOOSING)
    ids = iter(range(300, 400))
    for agent, expected in (("Choosing", [1.0, None, None]), ("Rewording", [None, None, 1.0])):
        workflow = AgentEnvWorkflow(env="agentrl.envs.arithmetic:Arithmetic", agent=f"{file}:{agent}")
        script = lambda _, params: answer([*template.tokenizer.encode(f"It is {next(ids)} or 2"), template.eos_id])  # noqa: E731
        found = await episode_of(template, workflow, script=script)
        nodes = found.trajectories["assistant"].nodes
        assert [node.reward for node in nodes if any(node.loss_mask)] == expected, found.error


CHOOSING = """
from agentrl.agents.chat import ChatAgent

class Choosing(ChatAgent):
    async def step(self, observation, info):
        reply = await self.llm.chat.completions.create(messages=observation, n=3)
        return reply.choices[0].message.model_dump(exclude_none=True)

class Rewording(Choosing):
    async def step(self, observation, info):
        await super().step(observation, info)
        return {"role": "assistant", "content": "It is 2"}
"""


async def test_of_equal_answers_to_the_same_prompt_the_latest_is_credited(template: ChatTemplate) -> None:
    async def play(llm: LLM) -> Outcome:
        ask = [{"role": "user", "content": "your move"}]
        for reward in (0.25, 0.75):
            reply = await llm.session().chat.completions.create(messages=ask)
            llm.reward(reward, message=reply.choices[0].message.model_dump(exclude_none=True))
        return Outcome(reward=1.0)

    found = await episode_of(template, Scripted(play))
    nodes = found.trajectories["assistant"].nodes
    assert nodes[1].message == nodes[2].message and [node.reward for node in nodes] == [None, 0.25, 0.75]


async def test_a_plain_episode_has_no_role_rewards(template: ChatTemplate, tmp_path: Path) -> None:
    async def play(llm: LLM) -> Outcome:
        await speak(llm, "assistant")
        llm.reward(0.25)
        return Outcome(reward=1.0)

    found = await episode_of(template, Scripted(play))
    assert found.role_rewards == {} and found.reward_of("assistant") == 1.0 and found.tag is None
    journal = Journal(tmp_path, episodes=True)
    journal.episode(found)
    journal.close()
    assert json.loads((tmp_path / "episodes.jsonl").read_text())["role_rewards"] == {}


async def test_the_tag_is_the_text_or_the_whole_number_of_the_tasks_row(template: ChatTemplate) -> None:
    workflow = Scripted(lambda llm: Outcome(reward=1.0))
    for row, expected in (({"tag": "easy"}, "easy"), ({"tag": 3}, "3"), ({"tag": True}, None), ({}, None)):
        found = await run_episode(
            workflow, Task(id="t", data=row), client(template, lambda ids, params: None),  # type: ignore[arg-type,return-value]
            group_id="g", index=0, seed=0, limits=Limits(9.0, 9.0), left=Abandoned(),
        )  # fmt: skip
        assert found.tag == expected
    check_tags([Task(id="t", data={})], "role")
    check_tags([Task(id="t", data={"tag": "easy"})], "tag")
    with pytest.raises(DataError, match=r"trainer\.baseline=tag .* task train/3 has none"):
        check_tags([Task(id="train/3", data={"tag": [3]})], "tag")


def game(group: str, white: float, *, shared: float = 0.0, tag: str | None = None) -> Episode:
    """Makes an episode of two roles with opposite rewards, each with one sampled token."""
    one = episode(group, shared, [5])
    (trajectory,) = one.trajectories.values()
    roles = {"white": trajectory, "black": Trajectory(nodes=[node.model_copy() for node in trajectory.nodes])}
    update = {"trajectories": roles, "role_rewards": {"white": white, "black": -white}, "tag": tag}
    return one.model_copy(update=update)


def test_a_zero_sum_game_is_uniform_by_role_and_not_by_its_sum() -> None:
    won, lost = game("g", 1.0), game("g", -1.0)
    assert not is_uniform([won, lost], SEEN) and not is_uniform(Columns.of([won, lost]).episodes, SEEN)
    assert is_uniform([won, won], SEEN) and is_uniform([won], SEEN)
    assert is_uniform([game("g", 1.0, shared=1.0), game("g", 1.0, shared=2.0)], SEEN), "no role has the shared one"
    assert not is_uniform([won], SEEN, "group"), "one side is compared with the other"
    alike = [episode("g", 1.0, [5]), episode("g", 1.0, [6])]
    assert is_uniform(alike, SEEN) and not is_uniform([*alike, episode("g", 0.0, [6])], SEEN)
    assert is_uniform([won, lost], RewardConfig(clip=(5.0, 6.0)))


def test_metrics_show_each_roles_reward_and_groups_with_signal_by_role() -> None:
    groups = [
        Group(0, Columns.of([game("g", 1.0), game("g", -0.5)]), Tally("kept")),
        Group(1, Columns.of([game("h", 1.0), game("h", 1.0)]), Tally("kept")),
    ]
    assert batch_metrics(groups, 0, SEEN)["rollout/groups_with_signal"] == 0.5
    config = RolloutConfig(skip_uniform_groups=True, group_size=2)
    games = ([game("g", 1.0), game("g", -0.5)], [game("h", 1.0), game("h", 1.0)])
    metrics = step_metrics([judge(one, config, SEEN) for one in games])
    assert [metrics[f"reward/{role}/mean_drawn"] for role in ("white", "black")] == [0.625, -0.625]
    assert [metrics[f"reward/{role}/mean_kept"] for role in ("white", "black")] == [0.25, -0.25], "one is filtered"
    assert metrics["reward/mean_drawn"] == 0.0
    plain = step_metrics([judge([episode("g", 1.0, [5])], RolloutConfig(group_size=1), SEEN)])
    assert [name for name in plain if name.startswith("reward/")] == ["reward/mean_drawn", "reward/mean_kept"]
    tagged = [
        Group(0, Columns.of([game("g", 1.0, tag="a")]), Tally("kept")),
        Group(1, Columns.of([game("h", 0.0, tag="a")]), Tally("kept")),
        Group(2, Columns.of([game("i", 0.0, tag="b")]), Tally("kept")),
    ]
    assert batch_metrics(tagged, 0, SEEN, "tag")["rollout/groups_with_signal"] == pytest.approx(2 / 3)
    assert batch_metrics(tagged, 0, SEEN)["rollout/groups_with_signal"] == 0.0
    assert summarize([game("g", 1.0)]).as_metrics()["eval/reward/black"] == -1.0


class Duel(RolloutWorkflow):
    """Each side says one thing; who wins depends on the seed, and the sum is 0."""

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        await speak(llm, "white", "black")
        for role, sign in (("white", 1.0), ("black", -1.0)):
            llm.reward(sign * float(seed % 97), role=role)
        return Outcome(reward=0.0)


async def test_groups_of_a_zero_sum_game_are_not_dropped_as_uniform(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.skip_uniform_groups=true")
    harness.controller.rollouts.episodes.workflow = Duel()
    harness.controller.start()
    found = episodes_of(await harness.controller.next_batch(0))
    assert len(found) == 6 and {one.reward for one in found} == {0.0}
    assert [one.role_rewards["white"] + one.role_rewards["black"] for one in found] == [0.0] * 6
    await harness.publish(1)
    assert "reward/white/mean_kept" in harness.written[-1][1]
    await harness.controller.close()


async def test_a_part_of_the_shared_reward_goes_to_the_role_that_sampled_the_message(template: ChatTemplate) -> None:
    ids = iter(range(300, 400))
    script = lambda _, params: answer([*template.tokenizer.encode(f"It is {next(ids)}"), template.eos_id])  # noqa: E731

    async def play(llm: LLM) -> Outcome:
        said = {}
        for role in ("planner", "assistant", "executor"):
            reply = await llm.session(role).chat.completions.create(messages=[{"role": "user", "content": "go"}])
            said[role] = reply.choices[0].message.model_dump(exclude_none=True)
        llm.reward(0.25, message=said["planner"])
        llm.reward(0.5, message={"role": "assistant", "content": "said by none"})
        llm.reward(1.0, role="executor")
        assert llm.earned() == 0.75
        return Outcome(reward=llm.earned())

    found = await episode_of(template, Scripted(play), script=script)
    assert found.error is None and found.role_rewards == {"executor": 1.0}
    own = {role: [n.reward for n in one.nodes if any(n.loss_mask)] for role, one in found.trajectories.items()}
    assert own == {"planner": [0.25], "assistant": [0.5], "executor": [1.0]}


async def test_without_an_assistant_the_role_opened_last_earns_what_names_no_message(template: ChatTemplate) -> None:
    async def play(llm: LLM) -> Outcome:
        await speak(llm, "planner", "executor")
        llm.session("mute")
        llm.reward(0.5)
        return Outcome(reward=0.5)

    found = await episode_of(template, Scripted(play))
    assert found.trajectories["executor"].nodes[-1].reward == 0.5 and found.error is None


async def test_the_episodes_chat_client_is_that_of_the_assistant(template: ChatTemplate) -> None:
    async def play(llm: LLM) -> Outcome:
        await llm.chat.completions.create(messages=[{"role": "user", "content": "go"}])
        return Outcome(reward=1.0)

    assert set((await episode_of(template, Scripted(play))).trajectories) == {"assistant"}
