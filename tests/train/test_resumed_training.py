"""A real trainer and a real controller, over HTTP: a run in one go, and the same run with a resume in its middle."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.core.weight_manifest import WeightManifest
from agentrl.rollout.journal_proof import prove
from agentrl.train.checkpoint_state import ROLLOUTS_FILE, latest_checkpoint, read_state
from agentrl.train.controller_client import ControllerClient
from agentrl.train.trainer import Trainer
from tests.rollout.test_controller import Harness
from tests.rollout.test_evaluation import served
from tests.train.toy_policy import make_engine

STEPS = 4
SETTINGS = ("rollout.max_staleness=0", "rollout.group_size=4", "trainer.save_every=1", "trainer.learning_rate=1e-3",
            "trainer.schedule=constant", "trainer.warmup_steps=0", "trainer.time_budget=null",
            "trainer.max_first_mismatch=null", "eval.every=2")  # fmt: skip


class Offered:
    """Publisher that says that a version is there."""

    unchanged = None

    def publish(self, version: int, offer: Any) -> None:
        offer(
            WeightManifest(
                version=version, path=f"/v{version}", transport="disk", dtype="F32", nbytes=0, fingerprints={}
            )
        )


async def life(folder: Path, model: Path, total: int, learned: list[dict[str, float]]) -> list[torch.Tensor]:
    """Train to a step, from the folder's checkpoint if there is one; returns the parameters."""
    folder.mkdir(exist_ok=True)
    harness = Harness(folder, model, *SETTINGS, f"trainer.total_steps={total}")
    found = latest_checkpoint(folder / "checkpoints")
    if found is not None:
        harness.controller.restore(read_state(found)["step"], (found / ROLLOUTS_FILE).read_bytes(), recorded=True)
    config = harness.recipe.trainer
    engine = make_engine(
        model, {"learning_rate": config.learning_rate, "aggregation_length": config.aggregation_length}
    )

    def train(url: str) -> None:
        client = ControllerClient(url, 60.0)
        trainer = Trainer(harness.recipe, model, folder, engine, Offered(), client)  # type: ignore[arg-type]
        trainer.export = lambda target: None  # type: ignore[method-assign]
        trainer.resume()
        trainer.run()

    async with served(harness) as url:
        harness.controller.start()
        await asyncio.to_thread(train, url)
    harness.journal.close()
    learned += [metrics for step, metrics in harness.written if "train/loss" in metrics]
    return [parameter.detach().clone() for parameter in engine.policy.parameters()]


async def test_a_run_with_a_resume_is_the_run_in_one_go_to_the_bit(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    whole: list[dict[str, float]] = []
    parts: list[dict[str, float]] = []
    expected = await life(tmp_path / "whole", tiny_model, STEPS, whole)
    for total in (1, 3, STEPS):
        found = await life(tmp_path / "parts", tiny_model, total, parts)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [one["train/loss"] for one in parts] == [one["train/loss"] for one in whole]
    assert len({one["train/loss"] for one in whole}) == STEPS
    trained = [prove(tmp_path / name) for name in ("whole", "parts")]
    assert [proof.steps for proof in trained] == [STEPS, STEPS] and [proof.resumes for proof in trained] == [0, 2]
    draws = [{draw: end["step"] for draw, (_, end) in proof.ends.items()} for proof in trained]
    assert draws[0] == draws[1] == {draw: draw // 2 for draw in range(2 * STEPS)}
