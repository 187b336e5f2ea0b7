"""Whole runs through the command line: launcher, torchrun, TRL, with the tiny model."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.end_to_end import SECONDS, command, environment, metrics, processes_of, run
from tests.supervised import examples as toy_lines
from tests.supervised.examples import settings, write_lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("lines"))


@pytest.fixture(scope="module")
def finished(tiny_model: Path, runs: Path, lines: Path) -> dict[str, str]:
    """What the three recipes said, run at the same time; SFT on an environment, with its evaluation."""
    evaluated = (f"env.id={toy_lines.__file__}:Say", "supervised.evaluate=true", "sampling.max_new_tokens=8")
    more = {
        "sft": (*evaluated, "eval.tasks=8", "inference.threads=1", "trainer.save_every=4"),
        "dpo": ("supervised.batch_size=4", "trainer.learning_rate=3e-3"),
        "rm": ("trainer.nproc=2", "trainer.learning_rate=3e-4"),
    }
    processes = {
        name: subprocess.Popen(
            command("recipe", "run", f"gsm8k_{name}", *settings(tiny_model, runs, name, lines, *own)),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, own in more.items()
    }  # fmt: skip
    said = {name: process.communicate(timeout=SECONDS)[0] for name, process in processes.items()}
    for name, process in processes.items():
        assert process.returncode == 0, said[name]
    return said


def test_sft_lowers_its_loss_and_keeps_the_accounts_of_a_run(finished: dict[str, str], runs: Path) -> None:
    folder = runs / "sft"
    for name in ("config.json", "metrics.jsonl", "loss.png", "eval-episodes.jsonl", "eval-000000.json"):
        assert (folder / name).stat().st_size > 0, name
    assert len((folder / "eval-episodes.jsonl").read_text().splitlines()) == 2 * 8
    assert list((folder / "tensorboard").iterdir())
    assert {p.name for p in (folder / "logs").iterdir()} == {"server-0.log", "trainer.log"}
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000006"], "the newest alone"
    records = metrics(folder)
    steps = [r for r in records if "train/loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] - 1
    keys = ("train/learning_rate", "train/grad_norm", "train/tokens", "train/token_accuracy", "time/step")
    assert all(r[key] > 0 for r in steps[-2:] for key in keys)
    held_out = [r for r in records if "eval/loss" in r]
    assert [r["step"] for r in held_out] == [0, 6] and held_out[1]["eval/loss"] < held_out[0]["eval/loss"] - 1
    assert [r["step"] for r in records if "eval/accuracy" in r] == [0, 6]
    said = finished["sft"]
    assert "step 6/6  loss" in said and "before" in said and "test accuracy" in said and "loss.png" in said


def test_sft_exports_a_model_that_grpo_takes(finished: dict[str, str], runs: Path, tiny_model: Path) -> None:
    folder = runs / "sft" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template
    assert model.config.use_cache and model.dtype == torch.float32
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_tensors="pt", return_dict=True)
    assert model.generate(**ids, max_new_tokens=2).shape[1] == ids["input_ids"].shape[1] + 2
    planned = run("recipe", "run", "gsm8k_grpo", f"model.name={folder}", "inference.context_length=1024", "--dry-run")
    assert planned.returncode == 0 and f"local folder {folder}" in planned.stdout, planned.stdout


def test_dpo_raises_its_margin(finished: dict[str, str], runs: Path) -> None:
    records = metrics(runs / "dpo")
    steps = [r for r in records if "train/loss" in r]
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-4), "the policy is its own reference"
    assert steps[-1]["train/margin"] > 0.1 and steps[-1]["train/loss"] < 0.65
    before, after = (r for r in records if "eval/loss" in r)
    assert "eval/pair_accuracy" not in before, "nothing is told apart before the first step"
    assert after["eval/pair_accuracy"] == 1.0 and after["eval/pair_accuracy_low"] > 0.7
    assert "pair accuracy" in finished["dpo"]


def test_a_reward_model_learns_to_tell_pairs_apart(finished: dict[str, str], runs: Path, tiny_model: Path) -> None:
    before, after = (r for r in metrics(runs / "rm") if "eval/loss" in r)
    assert after["eval/loss"] < before["eval/loss"] and after["eval/margin"] > before["eval/margin"]
    assert after["eval/pair_accuracy"] >= before["eval/pair_accuracy"] and after["eval/pair_accuracy"] > 0.9
    folder = runs / "rm" / "model"
    scoring = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert scoring.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    scores = []
    for answer in ("aaa", "zzz"):
        talk = [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"][:-1]  # up to the end of turn
        scores.append(scoring(torch.tensor([ids])).logits.item())
    assert scores[0] > scores[1]


def test_a_run_resumes_from_its_newest_checkpoint(
    finished: dict[str, str], runs: Path, lines: Path, tiny_model: Path
) -> None:
    (runs / "rm" / "checkpoints" / "checkpoint-7").mkdir()  # what a kill leaves
    more = settings(tiny_model, runs, "rm", lines, "trainer.nproc=2", "trainer.total_steps=8")
    result = run("recipe", "run", "gsm8k_rm", *more, "--resume")
    assert result.returncode == 0, result.stdout
    records = metrics(runs / "rm")
    assert [r["step"] for r in records if "train/loss" in r] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r["step"] for r in records if "eval/loss" in r] == [0, 6, 8]
    assert [p.name for p in (runs / "rm" / "checkpoints").iterdir()] == ["step-000008"]
    state = json.loads((runs / "rm" / "checkpoints" / "step-000008" / "state.json").read_text())
    assert state["step"] == 8 and state["elapsed"] > 0


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_stopped_run_leaves_no_process(stop: signal.Signals, tiny_model: Path, runs: Path, lines: Path) -> None:
    name = f"stopped-{stop.name}"
    arguments = settings(tiny_model, runs, name, lines, "trainer.total_steps=100000")
    process = subprocess.Popen(
        command("recipe", "run", "gsm8k_sft", *arguments),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "step 2/" in line:
            break
    children = processes_of(runs / name)
    assert len(children) >= 2, "torchrun and its rank"
    process.send_signal(stop)
    rest, _ = process.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while any(child.is_running() and child.status() != "zombie" for child in children):
        assert time.monotonic() < deadline, [c.cmdline() for c in children if c.is_running()]
        time.sleep(0.1)  # processes of another session end without telling us
    if stop == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in rest
    assert not (runs / name / "model").exists()


def test_lines_without_pairs_are_refused_before_anything_starts(tiny_model: Path, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "hi", "completion": "ho"}\n')
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "test.jsonl")
    result = run("recipe", "run", "gsm8k_dpo", *settings(tiny_model, runs, "no-pairs", tmp_path, "env.id=none"))
    assert result.returncode == 2
    assert "trainer.type=dpo needs examples with prompt, chosen and rejected" in result.stdout.replace("\n", " ")
    assert "Traceback" not in result.stdout and not (runs / "no-pairs").exists()
