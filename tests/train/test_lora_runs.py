"""Tests runs that train an adapter, with all real processes: the servers answer with the trained adapter."""

import subprocess
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.end_to_end import SECONDS, command, environment, metrics, overrides, run

KL = "trainer.kl_coef=0.01"
WAYS = {
    "merged": ("trainer.nproc=2", "weights.transport=broadcast"),
    "adapter": ("trainer.lora_push=adapter", "trainer.save_every=2"),
}


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs one training for each value of ``lora_push``, at the same time."""
    made = tmp_path_factory.mktemp("runs")
    processes = [
        subprocess.Popen(
            command(
                "recipe", "run", "arithmetic_grpo",
                *overrides(tiny_model, made, name, "trainer.lora_rank=4", "trainer.learning_rate=3e-2", KL, *more),
            ),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, more in WAYS.items()
    ]  # fmt: skip
    for process in processes:
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
    return made


@pytest.mark.parametrize("way", WAYS)
def test_the_servers_answer_by_each_new_adapter(runs: Path, way: str) -> None:
    records = metrics(runs / way)[1:]
    assert [r["step"] for r in records] == [1, 2, 3]
    assert all(r["staleness/max"] == 0 and r["mismatch/ratio_max"] < 1e-4 for r in records)
    assert all(r["train/grad_norm"] > 0 for r in records), "it never moved"
    assert records[0]["train/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert records[2]["train/kl_reference"] > 1e-5, "the policy is still the reference: nothing was learned"
    assert "goes by file" not in (runs / way / "logs" / "trainer.log").read_text()


def test_both_ways_and_any_ranks_learn_the_same(runs: Path) -> None:
    merged, adapter = (load_file(runs / way / "model" / "model.safetensors") for way in WAYS)
    assert merged.keys() == adapter.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(adapter[name], tensor, atol=5e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_the_export_is_a_plain_model_and_the_adapter_beside_it_makes_the_same(
    runs: Path, tiny_model: Path, way: str
) -> None:
    exported, start = (load_file(p / "model.safetensors") for p in (runs / way / "model", tiny_model))
    assert exported.keys() == start.keys()
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    merged = PeftModel.from_pretrained(base, runs / way / "adapter").merge_and_unload()  # type: ignore[operator]
    again = dict(merged.named_parameters())
    for name, tensor in exported.items():
        torch.testing.assert_close(again[name].detach(), tensor, atol=1e-6, rtol=1e-5, msg=name)
        assert ("_proj" in name) == (not torch.equal(tensor, start[name])), name


def test_a_run_resumes_with_its_adapter(runs: Path, tiny_model: Path) -> None:
    more = ("trainer.lora_rank=4", "trainer.learning_rate=3e-2", KL, *WAYS["adapter"], "trainer.total_steps=4")
    result = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, runs, "adapter", *more), "--resume")
    assert result.returncode == 0, result.stdout
    records = metrics(runs / "adapter")
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    assert records[4]["mismatch/ratio_max"] < 1e-4, "the server did not get the resumed adapter"
    checkpoints = sum(f.stat().st_size for f in (runs / "adapter" / "checkpoints").rglob("*.distcp"))
    model = (tiny_model / "model.safetensors").stat().st_size
    assert checkpoints < 3 * model, "the frozen weights are in the checkpoint"
