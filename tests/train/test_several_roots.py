"""Tests that an episode whose turns are conversations of their own is credited like the same episode in one piece."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from agentrl.config.recipe import TrainerConfig
from agentrl.core.agent import ContextOverflow
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.session import ChatSession
from agentrl.inference.template import ChatTemplate
from agentrl.train.batch import Batch
from agentrl.train.branches import tokens_of
from agentrl.train.returns import returns_to_go
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_session import HELLO, REWRITING, SETTINGS, TOOL

CHOICES = {
    "turns": {"advantage": "turns", "scale_rewards": "none", "discount": 0.9},
    "gae": {"preset": "ppo", "whiten": "none", "discount": 0.9, "gae_lambda": 0.8},
}


def said(number: int) -> str:
    return f"<think>{'x' * number}</think>yes {number}"


def client(model: Path, policy: str) -> EpisodeLLM:
    tokenizer = AutoTokenizer.from_pretrained(model)
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + REWRITING.replace("<|im_end|>", f"{calls}<|im_end|>")
    template = ChatTemplate(tokenizer, policy=policy)  # type: ignore[arg-type]
    answers = (answer([*tokenizer.encode(said(n), add_special_tokens=False), template.eos_id]) for n in range(9))
    backend = FakeBackend(lambda ids, params: next(answers))
    return EpisodeLLM(lambda role: ChatSession(backend, template, SETTINGS, role))


async def talk(model: Path, policy: str, rewards: list[float], reason: StopReason, group: str) -> Episode:
    """Runs a conversation in which each turn but the last drops out of the next prompt's reasoning."""
    llm = client(model, policy)
    messages = [HELLO]
    for reward in rewards:
        reply = await llm.session().chat.completions.create(messages=messages)  # type: ignore[attr-defined]
        messages = [*messages, reply.choices[0].message.model_dump(exclude_none=True), HELLO]
        llm.reward(reward)
    return made(llm, sum(rewards), reason, group)


def made(llm: EpisodeLLM, reward: float, reason: StopReason, group: str) -> Episode:
    return Episode(
        group_id=group, task_id="t", index=0, seed=0, reward=reward, stop_reason=reason,
        trajectories=llm.trajectories(),
    )  # fmt: skip


def advantages(episodes: list[Episode], choice: str) -> tuple[Batch, list[float]]:
    """Returns the advantages of all sampled tokens; the critic's values are the same for the same places."""
    batch = Batch(Columns.of(episodes), TrainerConfig.model_validate(CHOICES[choice]))
    values = None
    if choice == "gae":
        random, total = np.random.default_rng(0), batch.tokens.total
        values = np.concatenate([random.normal(size=total), np.zeros(len(batch.branches))])
        for branch in batch.asked_values():
            if branch.bootstrap is not None:
                values[branch.bootstrap] = random.normal()
    return batch, batch.train_batch(values=values).tokens.sampled["advantages"].tolist()


@pytest.mark.parametrize("reason", [StopReason.TERMINATED, StopReason.TRUNCATED])
@pytest.mark.parametrize("choice", CHOICES)
async def test_branch_history_is_credited_like_the_same_turns_in_one_conversation(
    choice: str, reason: StopReason, tiny_model: Path
) -> None:
    found = {}
    for policy in ("append", "branch"):
        episodes = [
            await talk(tiny_model, policy, rewards, reason, "g") for rewards in ([0.0, 0.0, 1.0, 0.5], [0.0, 0.0, 0.0])
        ]
        batch, found[policy] = advantages(episodes, choice)
        roots = sum(int(parent) < 0 for parent in Columns.of(episodes).parents)
        assert roots == {"append": 2, "branch": 7}[policy]
        ends = [tokens_of(branch, batch.tokens) for branch in batch.asked_values() if branch.bootstrap is not None]
        assert len(ends) == (2 if reason is StopReason.TRUNCATED else 0)
        assert [end.turns.max() for end in ends] == ([3, 2] if ends else [])
    assert found["branch"] == found["append"] and len({round(value, 4) for value in found["append"]}) > 3


async def test_the_first_turn_gets_what_the_last_conversation_earned(tiny_model: Path) -> None:
    """Step rewards 0, 0, 1, of which the first turns got nothing when each turn was a root of its own."""
    good = await talk(tiny_model, "branch", [0.0, 0.0, 1.0], StopReason.TERMINATED, "g")
    bad = await talk(tiny_model, "branch", [0.0, 0.0, 0.0], StopReason.TERMINATED, "g")
    config = TrainerConfig(advantage="turns", scale_rewards="none")
    batch = Batch(Columns.of([good, bad]), config).train_batch()
    assert set(batch.tokens.sampled["advantages"].tolist()) == {0.5, -0.5}


async def choose(model: Path, policy: str, rewards: list[float], reason: StopReason, group: str) -> Episode:
    """Runs a conversation of two samples a call: now the first goes on and now the second, and the last is rewarded.

    The step's reward is of the sample that was taken last, which is the one that the environment acted on.
    """
    llm = client(model, policy)
    messages = [HELLO]
    for number, reward in enumerate(rewards):
        reply = await llm.session().chat.completions.create(messages=messages, n=2)  # type: ignore[attr-defined]
        chosen = reply.choices[number % 2].message.model_dump(exclude_none=True)
        messages = [*messages, chosen, HELLO]
        llm.reward(reward)
    return made(llm, sum(rewards), reason, group)


@pytest.mark.parametrize("reason", [StopReason.TERMINATED, StopReason.TRUNCATED])
@pytest.mark.parametrize("choice", CHOICES)
async def test_what_follows_counts_for_the_sample_whose_conversation_went_on(
    choice: str, reason: StopReason, tiny_model: Path
) -> None:
    found = {}
    for policy in ("append", "branch"):
        episodes = [
            await choose(tiny_model, policy, rewards, reason, "g") for rewards in ([0.0, 0.0, 1.0, 0.5], [0.0, 0.0])
        ]
        found[policy] = advantages(episodes, choice)[1]
    assert found["branch"] == found["append"] and len({round(value, 4) for value in found["append"]}) > 3


async def test_an_unchosen_sample_gets_its_own_reward_alone(tiny_model: Path) -> None:
    """Two samples of the first call; the second call, a conversation of its own, goes on from the second sample."""
    good, bad = [await choose_one(tiny_model, reward) for reward in (1.0, 0.0)]
    config = TrainerConfig(advantage="turns", scale_rewards="none", discount=1.0)
    batch = Batch(Columns.of([good, bad]), config)
    own = [one.turns for _, one in batch._entries(None, None)]
    assert [[turn.parent for turn in turns] for turns in own] == [[None, None, 1]] * 2
    returns = [returns_to_go(one, 1.0) for _, one in batch._entries(None, None)]
    assert returns == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


async def choose_one(model: Path, reward: float) -> Episode:
    llm = client(model, "branch")
    create = llm.session().chat.completions.create  # type: ignore[attr-defined]
    first = await create(messages=[HELLO], n=2)
    await create(messages=[HELLO, first.choices[1].message.model_dump(exclude_none=True), HELLO])
    llm.reward(reward)
    return made(llm, reward, StopReason.TERMINATED, "g")


async def test_other_tools_and_a_shortened_context_go_on_in_time(tiny_model: Path) -> None:
    episodes = []
    for last in (1.0, 0.0):
        llm = client(tiny_model, "append")
        create = llm.session().chat.completions.create  # type: ignore[attr-defined]
        await create(messages=[HELLO])
        await create(messages=[HELLO], tools=[TOOL])
        await create(messages=[{"role": "user", "content": "so far: hello"}], tools=[TOOL])
        llm.reward(last)
        episodes.append(made(llm, last, StopReason.TERMINATED, "g"))
    _, found = advantages(episodes, "turns")
    of_first = len(found) // 2
    expected = np.array([0.81, 0.9, 1.0]) - (0.81 + 0.9 + 1.0) / 6
    assert sorted({round(value, 6) for value in found[:of_first]}) == pytest.approx(sorted(expected), abs=1e-6)


async def test_the_end_of_a_truncated_episode_is_the_last_conversation_in_time(tiny_model: Path) -> None:
    """The role goes back to its first conversation, where the episode is cut off."""
    llm = client(tiny_model, "append")
    create = llm.session().chat.completions.create  # type: ignore[attr-defined]
    first = await create(messages=[HELLO])
    await create(messages=[{"role": "user", "content": "a question between"}])
    back = [HELLO, first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    await create(messages=back)
    cut = made(llm, 0.0, StopReason.TRUNCATED, "g")
    batch = Batch(Columns.of([cut]), TrainerConfig(preset="ppo"))
    (end,) = [branch for branch in batch.asked_values() if branch.bootstrap is not None]
    assert batch.tokens.turns[list(end.messages)].max() == 2


async def test_a_next_prompt_that_was_not_answered_bootstraps_the_last_turn_in_time(tiny_model: Path) -> None:
    """The role wants to go back to its first conversation, but the prompt does not fit any more."""
    llm = client(tiny_model, "append")
    create = llm.session().chat.completions.create  # type: ignore[attr-defined]
    first = await create(messages=[HELLO])
    await create(messages=[{"role": "user", "content": "a question between"}])
    long = {"role": "user", "content": "go on " * 500}
    with pytest.raises(ContextOverflow):
        await create(messages=[HELLO, first.choices[0].message.model_dump(exclude_none=True), long])
    cut = made(llm, 0.0, StopReason.CONTEXT_OVERFLOW, "g")
    batch = Batch(Columns.of([cut]), TrainerConfig(preset="ppo", whiten="none"))
    (end,) = [branch for branch in batch.asked_values() if branch.bootstrap is not None]
    assert batch.tokens.turns[list(end.messages)].max() == 1, "the last answer in time"
    values = np.zeros(batch.tokens.total + len(batch.branches))
    values[end.bootstrap] = 5.0
    assert set(batch.train_batch(values=values).tokens.sampled["advantages"].tolist()) == {5.0}


async def test_roles_that_speak_in_turn_are_each_credited_along_their_own_turns(tiny_model: Path) -> None:
    """Two roles of one episode, each with a conversation for every turn, against the same two as episodes."""
    rewards = {"white": ([0.0, 0.0, 1.0], [0.0, 0.5]), "black": ([0.0, 0.0, -1.0], [0.0, -0.5])}
    together: list[Episode] = []
    alone: dict[str, list[Episode]] = {role: [] for role in rewards}
    for index in range(2):
        sides = {
            role: await talk(tiny_model, "branch", earned[index], StopReason.TERMINATED, "g")
            for role, earned in rewards.items()
        }
        for role, one in sides.items():
            alone[role].append(one)
        trajectories = {role: one.trajectories["assistant"] for role, one in sides.items()}
        own = {role: one.reward for role, one in sides.items()}
        together.append(
            sides["white"].model_copy(update={"reward": 0.0, "role_rewards": own, "trajectories": trajectories})
        )
    _, found = advantages(together, "turns")
    columns = Columns.of(together)
    starts = columns.sampled_starts()
    for role, episodes in alone.items():
        ranges = [part for part in columns.trajectories() if part.role == role]
        of_role = [value for part in ranges for value in found[int(starts[part.first]) : int(starts[part.end])]]
        assert of_role == advantages(episodes, "turns")[1] and any(of_role)
