"""Tests what rewards are compared with: a role of a group, all roles of a group, or all tasks with one tag."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.load import load_recipe
from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Trajectory
from agentrl.train.advantages import group_advantages
from agentrl.train.batch import Batch
from agentrl.train.formula import formula
from agentrl.train.policy import Policy
from tests.rollout.test_role_rewards import game
from tests.train import toy_policy
from tests.train.test_batch import episode
from tests.train.toy_policy import CPU, GROUPS, make_engine

PLAIN = {"scale_rewards": "none"}
STEPS = 20


def advantages(episodes: list[Episode], rewards: RewardConfig | None = None, **choices: object) -> list[float]:
    """Returns the advantage of each episode's roles; each role has sampled one token."""
    columns = Columns.of(episodes)
    batch = Batch(columns, TrainerConfig.model_validate(PLAIN | choices), rewards).train_batch()
    return batch.tokens.sampled["advantages"].tolist()


def test_opposite_rewards_give_opposite_advantages() -> None:
    found = advantages([game("g", 1.0), game("g", -1.0)])
    assert found == [1.0, -1.0, -1.0, 1.0]
    scaled = advantages([game("g", 1.0), game("g", -1.0), game("g", 0.0)], scale_rewards="group")
    white = group_advantages([1.0, -1.0, 0.0], ["w"] * 3)
    assert scaled == pytest.approx([sign * value for value in white for sign in (1, -1)])
    turned = advantages([game("g", 1.0), game("g", -1.0)], advantage="turns")
    assert turned == found
    assert advantages([game("g", 1.0), game("g", -1.0)], RewardConfig(scale=2.0, clip=(-1.0, 9.0))) == [
        1.5, -1.5, -1.5, 1.5,
    ]  # fmt: skip


def test_a_role_without_its_own_reward_has_the_shared_one() -> None:
    pair = [game("g", 1.0, shared=3.0), game("g", -1.0, shared=1.0)]
    for one in pair:
        del one.role_rewards["black"]
    assert advantages(pair) == [1.0, 1.0, -1.0, -1.0]


def test_a_baseline_of_the_group_holds_all_its_roles() -> None:
    assert advantages([game("g", 1.0), game("g", 3.0), game("h", 5.0)], baseline="group") == [1, -1, 3, -3, 5, -5]
    assert advantages([game("g", 1.0), game("g", 3.0), game("h", 5.0)]) == [-1, 1, 1, -1, 0, 0]


def test_a_baseline_of_a_tag_goes_over_groups_and_keeps_roles_apart() -> None:
    """Uses groups of one: their own baseline gives nothing."""
    made = [game("g", 1.0, tag="a"), game("h", 4.0, tag="a"), game("i", 5.0, tag="b"), game("j", 0.0, tag="a")]
    assert advantages(made) == [0.0] * 8
    mean = (1.0 + 4.0 + 0.0) / 3
    white = [1.0 - mean, 4.0 - mean, 0.0, 0.0 - mean]
    assert advantages(made, baseline="tag") == pytest.approx([s * value for value in white for s in (1, -1)])
    others = advantages(made, baseline="tag", advantage="leave_one_out")
    assert others[::2] == pytest.approx([1.0 - 2.0, 4.0 - 0.5, 0.0, 0.0 - 2.5])
    with pytest.raises(ValueError, match=r"trainer\.baseline=tag .* task t has none"):
        advantages([episode("g", 1.0, [5])], baseline="tag")


def test_a_baseline_that_cannot_act_is_refused_with_both_keys() -> None:
    for choice in ("trainer.advantage=reward", "trainer.preset=ppo"):
        with pytest.raises(Exception, match=r"trainer\.baseline=group does nothing with trainer\.advantage="):
            load_recipe("arithmetic_grpo", ["trainer.baseline=group", choice, "trainer.scale_rewards=none"])
    with pytest.raises(Exception, match=r"trainer\.baseline=tag .*rollout\.skip_uniform_groups=true"):
        load_recipe("arithmetic_grpo", ["trainer.baseline=tag", "rollout.skip_uniform_groups=true"])
    with pytest.raises(Exception, match=r"rollout\.group_size must be at least 2, or trainer\.baseline=tag"):
        load_recipe("arithmetic_grpo", ["trainer.baseline=group", "rollout.group_size=1"])
    recipe = load_recipe("arithmetic_grpo", ["trainer.baseline=tag", "rollout.group_size=1"])
    assert any("one tag" in line for line in formula(recipe.trainer))
    assert any("all roles" in line for line in formula(TrainerConfig(baseline="group")))
    assert not any("all roles" in line or "tag" in line for line in formula(TrainerConfig()))


def play(policy: Policy, version: int, generator: torch.Generator) -> list[Episode]:
    """Plays a zero-sum game, in which White gains by even ids and Black by odd ones.

    Both sides are the same policy, and tell their side by the prompt.
    """
    sides = {
        role: toy_policy.sample(
            policy, version, generator, prompts=torch.full((GROUPS, 3), prompt) + torch.arange(GROUPS)[:, None]
        )
        for role, prompt in (("white", 3), ("black", 101))
    }
    games = []
    for white, black in zip(sides["white"], sides["black"], strict=True):
        assert white.reward is not None and black.reward is not None
        margin = white.reward - (1.0 - black.reward)
        trajectories: dict[str, Trajectory] = {
            "white": white.trajectories["assistant"], "black": black.trajectories["assistant"],
        }  # fmt: skip
        own = {"white": margin, "black": -margin}
        games.append(white.model_copy(update={"reward": 0.0, "role_rewards": own, "trajectories": trajectories}))
    return games


def chosen(games: list[Episode], role: str) -> float:
    """Returns the share of the ids that a role sampled which are its winning move."""
    ids = [token for one in games for token in one.trajectories[role].nodes[1].token_ids]
    return sum(token % 2 == (role == "black") for token in ids) / len(ids)


def test_both_sides_of_a_zero_sum_game_learn(tiny_model: Path, mesh: DeviceMesh) -> None:
    engine = make_engine(tiny_model, {})
    generator = torch.Generator(CPU).manual_seed(0)
    seen: dict[str, list[float]] = {"white": [], "black": []}
    for step in range(STEPS):
        games = play(engine.policy, step, generator)
        assert {one.reward for one in games} == {0.0}, "the sum says nothing: the signal is each role's own"
        for role, shares in seen.items():
            shares.append(chosen(games, role))
        engine.update(Batch(Columns.of(games), engine.config).train_batch(version=step), 2e-2)
    for shares in seen.values():
        assert shares[0] < 0.65 and min(shares[-3:]) > shares[0] + 0.15, f"{seen}"
