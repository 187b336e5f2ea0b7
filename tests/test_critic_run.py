"""PPO through all real processes: ranks, warm-up, checkpoints."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end import metrics, overrides, run

PPO = (
    "trainer.preset=ppo", "trainer.critic_warmup=1", "trainer.critic_learning_rate=1e-2", "trainer.gae_lambda=0.9",
    "trainer.minibatches=2",
)  # fmt: skip


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


def test_two_ranks_and_a_resume_give_what_one_rank_gives(tiny_model: Path, tmp_path: Path) -> None:
    """The critic too is gathered, saved and restored: its values decide what the last step does."""
    settings = {"straight": (), "resumed": ("trainer.nproc=2", "trainer.total_steps=2")}
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run, "recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, name, *PPO, *more))
            for name, more in settings.items()
        ]
        for one in runs:
            assert one.result().returncode == 0, one.result().stdout
    rest = overrides(tiny_model, tmp_path, "resumed", *PPO)
    second = run("recipe", "run", "arithmetic_grpo", *rest, "--resume")
    assert second.returncode == 0, second.stdout
    records, again = metrics(tmp_path / "straight")[1:], metrics(tmp_path / "resumed")[1:]
    assert [r["train/skipped"] for r in records] == [1.0, 0.0, 0.0], "the critic learns alone at first"
    assert ["train/loss" in r for r in records] == [False, True, True], "no loss of the policy while it waits"
    for key in ("critic/loss", "critic/explained", "train/loss"):
        expected = [r[key] for r in records if key in r]
        assert [r[key] for r in again if key in r] == pytest.approx(expected, abs=2e-3), key
    assert records[0]["critic/loss"] > 0
    ours, theirs = weights(tmp_path / "straight"), weights(tmp_path / "resumed")
    start = load_file(tiny_model / "model.safetensors")
    for name, tensor in ours.items():
        assert not torch.equal(tensor, start[name]), name
        torch.testing.assert_close(theirs[name], tensor, atol=5e-4, rtol=1e-3, msg=name)
