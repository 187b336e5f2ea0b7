"""A reward goes to the message that was acted on, whatever else was sampled with it, before it or after it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.episode import Episode, Node
from agentrl.core.workflow import LLM, Outcome
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.inference.acted_on import node_of
from agentrl.inference.backend import SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from tests.inference.fakes import FakeBackend, answer
from tests.rollout.test_episode_runner import TASK, Scripted, episode_of

PARTS = """
import json, random
from agentrl import LanguageEnvironment
from agentrl.agents.chat import ChatAgent

class Paying(LanguageEnvironment):
    # Pays what the seed says; the last step is judged as unfinished if the task says so.
    def __init__(self, log="", last=0.0):
        self.log, self.last = log, last
    async def reset(self, *, seed=None, options=None):
        self.draw = random.Random(seed)
        return [{"role": "user", "content": "begin"}], {}
    async def step(self, action):
        reward = round(self.draw.uniform(-1, 1), 3)
        with open(self.log, "a") as file:
            file.write(json.dumps([action["content"], reward]) + "\\n")
        return [{"role": "user", "content": f"turn {reward}"}], reward, False, False, {}
    async def judge_unfinished(self):
        return self.last, {}

class Chooses(ChatAgent):
    async def reset(self, *, seed=None, options=None):
        await super().reset()
        self.draw = random.Random(seed)
    async def step(self, observation, info):
        self.messages += observation
        reply = await self.llm.chat.completions.create(messages=self.messages, n=3)
        chosen = self.draw.choice(reply.choices).message.model_dump(exclude_none=True)
        self.messages.append(chosen)
        return chosen

class Reflects(Chooses):
    # Asks about its choice in another conversation, and acts on the choice.
    async def step(self, observation, info):
        chosen = await super().step(observation, info)
        judge = [{"role": "user", "content": f"Is this good? {chosen['content']}"}]
        await self.llm.chat.completions.create(messages=judge, n=2)
        return chosen

class Trims(Chooses):
    # Acts on its choice with other white space.
    async def step(self, observation, info):
        chosen = await super().step(observation, info)
        return {"role": "assistant", "content": "  " + chosen["content"] + "\\n"}
"""


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    return file


async def played(template: ChatTemplate, workflow: Any, seed: int) -> Episode:
    numbers = iter(range(1000, 9999))
    script = lambda ids, params: answer([*template.tokenizer.encode(f"answer {next(numbers)}"), template.eos_id])  # noqa: E731
    settings = SessionSettings(SamplingParams(max_new_tokens=20), 4000, locked=True, model="m")
    model = ChatClient(Router([FakeBackend(script)]), template, settings, settings)
    return await run_episode(
        workflow, TASK, model, group_id="g", index=1, seed=seed, limits=Limits(60.0, 9.0), left=Abandoned()
    )


def credited(episode: Episode) -> dict[str, float]:
    return {
        node.message["content"].strip(): node.reward
        for node in episode.trajectories["assistant"].nodes
        if node.reward is not None
    }


@pytest.mark.parametrize("agent", ["Chooses", "Reflects", "Trims"])
async def test_credit_is_where_the_choice_was(template: ChatTemplate, parts: Path, tmp_path: Path, agent: str) -> None:
    """Of three samples a random one is chosen, for a random reward, over several turns."""

    for seed in range(8):
        log = tmp_path / f"{agent}-{seed}.jsonl"
        workflow = AgentEnvWorkflow(
            f"{parts}:Paying", f"{parts}:{agent}", env_kwargs={"log": str(log)}, max_turns=1 + seed % 4
        )
        episode = await played(template, workflow, seed)
        acted = [json.loads(line) for line in log.read_text().splitlines()]
        assert not episode.error and len(acted) == 1 + seed % 4
        assert credited(episode) == {said.strip(): reward for said, reward in acted}
        assert episode.reward == pytest.approx(sum(reward for _, reward in acted))


async def test_what_is_judged_at_the_end_goes_to_the_message_that_was_acted_on_last(
    template: ChatTemplate, parts: Path, tmp_path: Path
) -> None:

    for seed in range(6):
        log = tmp_path / f"{seed}.jsonl"
        workflow = AgentEnvWorkflow(
            f"{parts}:Paying", f"{parts}:Chooses", env_kwargs={"log": str(log), "last": 0.5}, max_turns=2
        )
        episode = await played(template, workflow, seed)
        acted = [json.loads(line) for line in log.read_text().splitlines()]
        acted[-1][1] += 0.5
        assert credited(episode) == pytest.approx(dict(acted))


async def test_each_roles_reward_goes_to_its_own_choice(template: ChatTemplate) -> None:
    draw, expected = random.Random(0), {"planner": {}, "actor": {}}

    async def play(llm: LLM) -> Outcome:
        said = {role: [{"role": "user", "content": f"{role}, begin"}] for role in expected}
        for turn in range(4):
            chosen = {}
            for role, messages in said.items():
                reply = await llm.session(role).chat.completions.create(messages=messages, n=3)
                chosen[role] = draw.choice(reply.choices).message
                messages += [chosen[role], {"role": "user", "content": f"turn {turn}"}]
            for role in sorted(chosen, key=lambda _: draw.random()):  # later than both, in any order
                value = round(draw.uniform(-1, 1), 3)
                llm.reward(value, role, message=chosen[role])
                expected[role][chosen[role].content] = value
        return Outcome(reward=0.0)

    episode = await played(template, Scripted(play), 1)
    for role, rewards in expected.items():
        nodes = episode.trajectories[role].nodes
        assert {n.message["content"]: n.reward for n in nodes if n.reward is not None} == rewards, episode.error


async def test_credit_finds_the_choice_where_each_turn_is_rendered_anew(
    tiny_model: Path, parts: Path, tmp_path: Path
) -> None:
    """With inference.history=branch a conversation's turns are sequences of their own."""

    template = ChatTemplate.from_folder(tiny_model, policy="branch")
    template.rewrites = lambda new, tools=(), **_: True  # type: ignore[method-assign]
    log = tmp_path / "log.jsonl"
    workflow = AgentEnvWorkflow(f"{parts}:Paying", f"{parts}:Chooses", env_kwargs={"log": str(log)}, max_turns=3)
    episode = await played(template, workflow, 2)
    acted = [json.loads(line) for line in log.read_text().splitlines()]
    assert credited(episode) == dict(acted) and not episode.error
    nodes = episode.trajectories["assistant"].nodes
    assert sum(node.parent is None for node in nodes) == 3


async def test_a_reward_without_a_message_goes_to_the_choice_unless_something_was_sampled_since(
    template: ChatTemplate,
) -> None:
    async def play(llm: LLM) -> Outcome:
        create, ask = llm.session().chat.completions.create, [{"role": "user", "content": "x"}]
        reply = await create(messages=ask, n=3)
        llm.reward(1.0, message=reply.choices[1].message.model_dump(exclude_none=True))
        llm.reward(0.25)
        await create(messages=[{"role": "user", "content": "y"}])
        llm.reward(0.5)
        return Outcome(reward=1.75)

    episode = await played(template, Scripted(play), 1)
    rewards = [node.reward for node in episode.trajectories["assistant"].nodes]
    assert rewards == [None, None, 1.25, None, None, 0.5], episode.error


def node(content: str, parent: int | None, sampled: bool = True, **more: Any) -> Node:
    role = "assistant" if sampled else "user"
    finish = "stop" if sampled else None
    return Node(parent=parent, message={"role": role, "content": content, **more}, finish_reason=finish)


def test_a_message_is_found_by_what_it_says() -> None:
    nodes = [node("ask", None, False), node("a", 0), node("b", 0), node("a", 0), node("next", 2, False), node("b", 4)]
    said = {"role": "assistant", "content": "a"}
    assert node_of(nodes, said, since=0) == 1, "of equal samples the first, which a conversation goes on from"
    assert node_of(nodes, {**said, "content": "b"}, since=0) == 5, "the newest call's first"
    assert node_of(nodes, {**said, "content": "a"}, since=4) == 1, "acted on again"
    assert node_of(nodes, {**said, "content": " b\n"}, since=4) == 5, "white space is the agent's"
    assert node_of(nodes, {**said, "content": " a\n"}, since=4) is None
    assert node_of(nodes, {"role": "user", "content": "ask"}, since=0) is None, "it was not sampled"
    for other in ("a", 3, None, {"role": "assistant", "content": [{"type": "image_url"}]}):
        assert node_of(nodes, other, since=0) is None


def test_calls_tell_samples_apart() -> None:
    def calling(id: str) -> dict[str, Any]:
        return {"tool_calls": [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}]}

    nodes = [node("ask", None, False), *(node("", 0, **calling(id)) for id in "xyz")]
    assert [node_of(nodes, {"role": "assistant", "content": None, **calling(id)}, since=0) for id in "xyz"] == [1, 2, 3]


async def test_an_action_that_is_no_message_is_the_last_samples(template: ChatTemplate) -> None:
    async def play(llm: LLM) -> Outcome:
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": "x"}], n=2)
        llm.reward(1.0, message=3)  # type: ignore[arg-type]
        return Outcome(reward=1.0)

    episode = await episode_of(template, Scripted(play))
    assert [node.reward for node in episode.trajectories["assistant"].nodes] == [None, None, 1.0]
