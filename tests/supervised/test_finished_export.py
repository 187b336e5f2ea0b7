"""A supervised run that was killed between its last checkpoint and its export."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.load import load_recipe
from agentrl.launch.resolve import resolve
from agentrl.launch.resume import missing_outputs, only_evaluates
from agentrl.observe.sinks import read_metrics
from agentrl.supervised.__main__ import learn
from agentrl.train.checkpoint_state import exported_step, latest_checkpoint, read_state
from tests.supervised.examples import settings, write_lines


def test_its_resume_makes_no_step_and_exports_the_same_model(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Two steps of more than an epoch has: transformers alone would go on in the middle of the epoch."""
    lines, folder = write_lines(tmp_path), tmp_path / "sft"
    given = settings(tiny_model, tmp_path, "sft", lines, "trainer.total_steps=2", "trainer.epochs=null")
    recipe = resolve(load_recipe("gsm8k_sft", given, device="cpu"), None)
    folder.mkdir()
    learn(recipe, folder, tiny_model, tmp_path / "ready.json", resume=False)
    found = latest_checkpoint(folder / "checkpoints")
    assert found is not None and exported_step(folder / "model") == 2
    first = load_file(folder / "model" / "model.safetensors")
    assert only_evaluates(recipe, folder)
    shutil.rmtree(folder / "model")
    assert "model/" in missing_outputs(recipe, folder, read_state(found)) and not only_evaluates(recipe, folder)
    learn(recipe, folder, tiny_model, tmp_path / "ready.json", resume=True)
    again = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert exported_step(folder / "model") == 2
    assert max(record["step"] for record in read_metrics(folder / "metrics.jsonl")) == 2
