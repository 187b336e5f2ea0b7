"""Tests that each preset improves the reward of a toy task, and that non-finite gradients stop a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.declarations import preset_names
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.train.batch import Batch
from agentrl.train.trainer import Trainer, TrainingStopped
from tests.train.toy_policy import GROUPS, MEMBERS, make_engine, mean_reward, sample

STEPS, RATE = 14, 2e-2
SEEDS = [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "preset", [name for name in preset_names() if name != "distill"]
)  # it has no reward: test_distill
def test_every_preset_improves_the_reward(preset: str, seed: int, tiny_model: Path, mesh: DeviceMesh) -> None:
    engine = make_engine(tiny_model, {"preset": preset})
    generator = torch.Generator().manual_seed(seed)
    rewards = []
    for step in range(STEPS):
        episodes = sample(engine.policy, step, generator)
        rewards.append(mean_reward(episodes))
        batch = Batch(Columns.of(episodes), engine.config)
        values = None if engine.critic is None else engine.critic.values(batch.asked_values(), batch.tokens)
        engine.update(batch.train_batch(version=step, values=values), RATE)
    assert rewards[0] < 0.65 and max(rewards[-3:]) > rewards[0] + 0.2, " ".join(f"{reward:.2f}" for reward in rewards)


class OneBatch:
    """Controller client that returns a batch for every step."""

    def __init__(self, batch: bytes) -> None:
        self.batch = batch

    def next_batch(self, step: int) -> bytes:
        return self.batch

    def ready(self, version: int | None = None, *, final: bool = False) -> bool:
        return True

    def record(self, *args: Any, **more: Any) -> None:
        return None


class Nowhere:
    """Publisher that sends no weights."""

    unchanged = None

    def publish(self, version: int, offer: Any) -> None:
        return None


def test_a_run_whose_gradients_stay_broken_stops_and_keeps_the_batches(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model, {"max_nonfinite": 3})
    batch = Columns.of(sample(engine.policy, 0, torch.Generator().manual_seed(0))).to_bytes(
        last=False, done=0.0, epochs=0, epochs_before=0, oldest_version=None
    )
    with torch.no_grad():
        next(engine.policy.parameters()).fill_(float("nan"))
    recipe = Recipe.model_validate(
        {"model": {"name": "x"}, "env": {"id": "arithmetic"}, "trainer": {"max_nonfinite": 3, "save_seconds": None}}
    )
    trainer = Trainer(recipe, tiny_model, tmp_path, engine, Nowhere(), OneBatch(batch))  # type: ignore[arg-type]
    with pytest.raises(TrainingStopped, match=r"3 steps in a row .*nonfinite"):
        trainer.run()
    kept = sorted((tmp_path / "nonfinite").iterdir())
    assert [file.name for file in kept] == ["step-000000.jsonl", "step-000001.jsonl", "step-000002.jsonl"]
    assert len([json.loads(line) for line in kept[0].read_text().splitlines()]) == GROUPS * MEMBERS
