"""Holds steps on extreme batches to the references: far ratios, large rewards, hardly any token to learn from."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentrl.core.episode import Episode, StopReason
from tests.references.cases import CASES, Groups, episodes_of
from tests.references.comparing import assert_same
from tests.references.learning import Learned, learned, setting
from tests.references.presets import PRESETS
from tests.references.step import Algorithm, train_step
from tests.references.variants import VARIANTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FAR = 50.0  # log ratio, whose square overflows in float32
TOO_FAR, LARGE = 78.0, 1e6  # log ratio and scale of rewards, whose product overflows
Every = tuple[dict[str, Any], Algorithm]
BOUNDED = (
    "grpo", "cispo", "sapo", "m2po", "icepop", "decoupled", "sequences rejected by their geometric mean",
    "sequences rejected by k1", "sequences rejected by k3 before the first update", "tokens masked from below",
    "correction of the sequence", "kl of tokens, gae",
)  # fmt: skip


def choice(name: str) -> Every:
    return VARIANTS[name] if name in VARIANTS else ({"preset": name}, PRESETS[name])


def far_apart(policy: Path, far: float = FAR) -> list[Episode]:
    """The best episodes have a token with a ratio of e^far, the worst one with e^-far."""
    episodes = episodes_of(["complete"], policy)
    for episode in episodes:
        node = next(node for node in episode.trajectories["assistant"].nodes if any(node.loss_mask))
        assert episode.reward is not None
        away = -far if episode.reward >= 0.9 else far if episode.reward <= 0.3 else 0.0
        node.logprobs[node.loss_mask.index(1)] += away
    return episodes


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_holds_at_any_ratio(name: str, models: Path, mesh: "DeviceMesh") -> None:
    choices, algorithm = choice(name)
    given = setting(models)
    found = learned(far_apart(given.policy), choices, given, models)
    assert_same(found, train_step(far_apart(given.policy), algorithm, given))


@pytest.mark.parametrize("name", ["rloo", "k3 times the ratio"])
def test_an_update_without_a_bound_is_made_while_its_gradient_is_finite(
    name: str, models: Path, mesh: "DeviceMesh"
) -> None:
    choices, algorithm = choice(name)
    given = setting(models)
    found = learned(far_apart(given.policy), {**choices, "max_grad_norm": 1e30}, given, models)
    assert found.metrics["train/nonfinite"] == 0.0 and 1e19 < found.metrics["train/grad_norm"] < math.inf
    assert_same(found, train_step(far_apart(given.policy), algorithm, given))


@pytest.mark.parametrize("name", ["rloo"])
def test_an_update_whose_gradient_overflows_is_skipped_and_counted(name: str, models: Path, mesh: "DeviceMesh") -> None:
    given = setting(models, scale=LARGE)
    found = learned(far_apart(given.policy, TOO_FAR), choice(name)[0], given, models)
    assert found.metrics["train/nonfinite"] == 1.0 and "train/grad_norm" not in found.metrics
    assert not any(change.any() for change in found.policy.values())


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_pp", "ppo", "turns, centered"])
def test_large_rewards_are_learned_from(name: str, models: Path, mesh: "DeviceMesh") -> None:
    choices, algorithm = choice(name)
    given = setting(models, scale=1e6)
    episodes = episodes_of(["complete"], given.policy)
    assert_same(learned(episodes, choices, given, models), train_step(episodes, algorithm, given))


def no_token(made: Groups) -> None:
    made.answer("a", 1.0, "...")
    made.answer("a", 0.0, "..")


def one_token(made: Groups) -> None:
    made.answer("a", 1.0, "x")
    made.answer("a", 0.0, ".")


def one_episode(made: Groups) -> None:
    made.answer("a", 1.0, "x.x")


def only_cut(made: Groups) -> None:
    made.answer("a", 1.0, "xx", StopReason.TRUNCATED)
    made.answer("a", 0.0, "xxx", finish="length")
    made.answer("a", 0.5, "xxx", StopReason.CONTEXT_OVERFLOW)


def all_failed_but_one(made: Groups) -> None:
    made.answer("a", None, "xx", StopReason.TIMEOUT)
    made.answer("a", 0.75, "xxx")
    made.answer("a", None, "xx", StopReason.AGENT_ERROR)


def all_failed(made: Groups) -> None:
    made.answer("a", None, "xx", StopReason.TIMEOUT)


def all_alike(made: Groups) -> None:
    for group in ("a", "b"):
        made.answer(group, 1.0, "xx")
        made.answer(group, 1.0, "xxx")


# Whatever the algorithm, some of these have nothing to learn from; where it learns, the change is the reference's.
@pytest.mark.parametrize(
    "made", [no_token, one_token, one_episode, only_cut, all_failed_but_one, all_failed, all_alike]
)
@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "reinforce_pp", "ppo", "reward over the batch's deviation"])
def test_hardly_a_token_is_learned_from_or_nothing_changes(
    name: str, made: Callable[[Groups], None], models: Path, mesh: "DeviceMesh", monkeypatch: pytest.MonkeyPatch
) -> None:
    choices, algorithm = choice(name)
    given, groups = setting(models), Groups(made.__name__)
    made(groups)
    monkeypatch.setitem(CASES, made.__name__, lambda: groups)
    episodes = episodes_of([made.__name__], given.policy)
    found = learned(episodes, choices, given, models)
    assert all(math.isfinite(value) for value in found.metrics.values()), found.metrics
    assert found.metrics["train/nonfinite"] == 0.0
    if not _learns(name, made, found):
        assert not any(change.any() for change in found.policy.values())
        assert found.metrics.get("train/loss", 0.0) == 0.0
        return
    expected = train_step(episodes, algorithm, given)
    assert found.metrics["train/grad_norm"] == pytest.approx(expected.metrics["train/grad_norm"], rel=1e-3)
    largest = max(change.abs().max().item() for change in expected.policy.values())
    for key, change in expected.policy.items():
        assert found.policy[key].numpy() == pytest.approx(change.numpy(), abs=1e-4 * largest), key


def _learns(name: str, made: Callable[[Groups], None], found: Learned) -> bool:
    """Whether some reward is compared with another, with the critic's values, or taken as it is."""
    tokens = made not in (no_token, all_failed)
    if name == "ppo":
        assert any(change.any() for change in found.critic.values()) == tokens
    compared = {only_cut} | ({one_token} if name in ("grpo", "rloo") else set())
    return tokens and {
        "grpo": made in compared, "dapo": made is one_token, "rloo": made in compared, "reinforce_pp": made is only_cut,
        "ppo": made is not one_token, "reward over the batch's deviation": made in (one_token, only_cut),
    }[name]  # fmt: skip
