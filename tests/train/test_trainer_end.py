"""How the trainer's loop ends when the tasks are exhausted, and when it saves at the end of a pass over them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.recipe import Recipe, WeightsConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import StopReason
from agentrl.train.checkpoint_state import SAVED_FILE, STOP_FILE
from agentrl.train.trainer import Trainer
from tests.train.test_presets_learn import Nowhere
from tests.train.toy_policy import make_engine, sample


class Batches:
    """Controller client that returns the given batches; it notes what is recorded."""

    def __init__(self, *batches: bytes) -> None:
        self.batches = batches
        self.recorded: list[tuple[int, bool]] = []
        self.finished = False

    def next_batch(self, step: int) -> bytes:
        return self.batches[step]

    def ready(self, version: int | None = None, *, final: bool = False) -> bool:
        return True

    def record(self, step: int, metrics: dict[str, float], *, final: bool) -> None:
        self.recorded.append((step, final))

    def finish(self) -> None:
        self.finished = True


def make_trainer(
    model: Path, folder: Path, settings: dict[str, Any], *facts: dict[str, Any]
) -> tuple[Trainer, Batches, list[tuple[str, int]]]:
    """A trainer with one batch for each of ``facts``, an empty one where they say so; saves and exports are noted."""
    engine = make_engine(model, settings)
    full = Columns.of(sample(engine.policy, 0, torch.Generator().manual_seed(0)))
    plain = {"last": False, "done": 0.0, "epochs": 0, "epochs_before": 0, "oldest_version": None}
    batches = [(Columns.of([]) if one.pop("empty", False) else full).to_bytes(**plain | one) for one in facts]
    trainer_section = {"save_seconds": None, **settings}
    recipe = Recipe.model_validate({"model": {"name": "x"}, "env": {"id": "arithmetic"}, "trainer": trainer_section})
    client = Batches(*batches)
    trainer = Trainer(recipe, model, folder, engine, Nowhere(), client)  # type: ignore[arg-type]
    done: list[tuple[str, int]] = []
    trainer.save = lambda elapsed: done.append(("save", trainer.step))  # type: ignore[method-assign]
    trainer.export = lambda target: done.append(("export", trainer.step))  # type: ignore[method-assign]
    return trainer, client, done


def test_a_batch_of_cut_episodes_that_are_left_out_has_no_loss(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    masked = {"mask_truncated": True}
    trainer, _, _ = make_trainer(tiny_model, tmp_path, masked)
    episodes = sample(trainer.engine.policy, 0, torch.Generator().manual_seed(0))
    cut = Columns.of([one.model_copy(update={"stop_reason": StopReason.TRUNCATED}) for one in episodes])
    metrics = trainer.update(cut, 0.1)
    assert metrics["train/tokens"] == 0 and metrics["train/skipped"] == 1 and "train/loss" not in metrics


@pytest.mark.parametrize("advantage", ["group", "reward"])
def test_a_kl_in_the_reward_is_shown(tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, advantage: str) -> None:
    """Its mean over all sampled tokens, whether it counts at its own token or for the episode; 0 before any update."""
    settings = {"kl_coef": 0.5, "kl_in": "reward", "advantage": advantage, "scale_rewards": "none"}
    trainer, _, _ = make_trainer(tiny_model, tmp_path, settings)
    episodes = sample(trainer.engine.policy, 0, torch.Generator().manual_seed(0))
    first, second = (trainer.update(Columns.of(episodes), 1e-2) for _ in range(2))
    assert first["train/kl_reference"] == second["train/kl_reference"] == pytest.approx(0, abs=1e-5)
    later = sample(trainer.engine.policy, 2, torch.Generator().manual_seed(1))
    assert trainer.update(Columns.of(later), 0.0)["train/kl_reference"] > 1e-3


def test_the_batch_that_is_the_last_makes_its_step_the_final_one(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    trainer, client, done = make_trainer(tiny_model, tmp_path, {"epochs": 1}, {}, {"last": True})
    trainer.run()
    assert client.recorded == [(1, False), (2, True)] and client.finished
    assert done == [("save", 2), ("export", 2)]


@pytest.mark.parametrize(("names", "pushed"), [("model", [1]), ("files", [0, 1])])
def test_servers_that_take_the_files_names_get_unchanged_weights_first(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, names: str, pushed: list[int]
) -> None:
    """A push that such a server does not take fails before an update is made."""
    trainer, client, _ = make_trainer(tiny_model, tmp_path, {"epochs": 1}, {"last": True})
    trainer.recipe = trainer.recipe.model_copy(update={"weights": WeightsConfig(names=names)})  # type: ignore[arg-type]
    versions: list[int] = []

    class Noting(Nowhere):
        def publish(self, version: int, offer: Any) -> None:
            versions.append(version)
            assert len(client.recorded) == max(0, version - 1)

    trainer.publisher = Noting()  # type: ignore[assignment]
    trainer.run()
    assert versions == pushed


def test_an_empty_batch_makes_the_step_before_it_the_final_one(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    trainer, client, done = make_trainer(tiny_model, tmp_path, {"epochs": 1}, {}, {"empty": True, "last": True})
    trainer.run()
    assert client.recorded == [(1, False), (1, True)] and client.finished
    assert done == [("save", 1), ("export", 1)]


@pytest.mark.parametrize(("asked", "saved"), [(1, 1), (2, 2), (3, None)])
def test_a_request_to_stop_saves_after_the_step_and_exports_nothing(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, asked: int, saved: int | None
) -> None:
    """A request in the last step changes nothing: the run ends as usual."""
    trainer, client, done = make_trainer(tiny_model, tmp_path, {"save_every": 0}, {}, {}, {"last": True})
    (tmp_path / "processes").mkdir()
    batches = client.next_batch

    def next_batch(step: int) -> bytes:
        if step + 1 == asked:
            (tmp_path / "processes" / STOP_FILE).touch()
        return batches(step)

    client.next_batch = next_batch  # type: ignore[method-assign]
    said: list[bool] = []

    def settle() -> bool:
        said.append((tmp_path / "processes" / SAVED_FILE).exists())
        return True

    trainer.saver.settle = settle  # type: ignore[method-assign]
    trainer.run()
    assert said == [False], "it is said when the checkpoint is complete"
    assert done == ([("save", 3), ("export", 3)] if saved is None else [("save", saved)])
    assert (tmp_path / "processes" / SAVED_FILE).exists() == (saved is not None)
    assert client.finished == (saved is None)


@pytest.mark.parametrize(("every", "saved"), [(1, [2, 4]), (2, [4])])
def test_checkpoints_by_epoch_follow_the_epochs_that_are_over(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, every: int, saved: list[int]
) -> None:
    """The last step saves anyway."""
    passes = [(0, 0), (0, 1), (1, 1), (1, 3), (3, 3)]
    facts = [{"epochs_before": before, "epochs": after} for before, after in passes]
    facts[-1]["last"] = True
    trainer, _, done = make_trainer(tiny_model, tmp_path, {"save_epochs": every}, *facts)
    trainer.run()
    assert [step for what, step in done if what == "save"] == [*saved, 5]


def test_the_learning_rate_follows_the_share_of_the_epochs_that_is_done(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    settings = {"schedule": "linear", "min_learning_rate_ratio": 0.0, "warmup_steps": 0, "total_steps": 10_000}
    trainer, _, _ = make_trainer(tiny_model, tmp_path, settings, {})
    plain = {"last": False, "epochs": 0, "epochs_before": 0, "oldest_version": None}
    rates = [trainer._decide({**plain, "done": done}, 0.0)["learning_rate"] for done in (0.0, 0.25, 0.75)]
    assert rates == pytest.approx([1e-6, 0.75e-6, 0.25e-6])


@pytest.mark.parametrize(("budget", "spent"), [(1e-3, 1e-3), (1e6, None), (None, None)])
def test_a_checkpoint_says_that_its_step_used_up_the_time(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float, spent: float
) -> None:
    trainer, _, _ = make_trainer(tiny_model, tmp_path, {"time_budget": budget, "total_steps": 2}, {}, {})
    states: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "agentrl.train.trainer.save_checkpoint", lambda saver, step, engine, state, files: states.append(state)
    )
    trainer.client.checkpoint = lambda step: b""  # type: ignore[union-attr,method-assign]
    trainer.save = lambda elapsed: Trainer.save(trainer, elapsed)  # type: ignore[method-assign]
    trainer.run()
    assert [state["spent_budget"] for state in states] == [spent]
