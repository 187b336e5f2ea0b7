"""Distillation through all real processes: the teacher's server is started, asked, and stopped with the rest."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.core.episode import Episode, Trajectory
from agentrl.data.vocabulary import TOKENIZER
from tests.end_to_end import metrics, overrides, processes_of, run
from tests.served import served
from tests.tiny import build_tiny_model

DISTILL = ("trainer.preset=distill", "teacher.threads=1", "teacher.dtype=float32")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another size with the same tokens."""
    return build_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, hidden=48)


def test_a_teacher_that_is_started_and_one_that_is_served_score_what_was_sampled(
    tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    """Alone and beside the reward; that a student learns from it is shown by tests/train/test_distill.py."""
    mixed = ("trainer.advantage=group", "trainer.distill_coef=0.5", "trainer.total_steps=2")
    with served(teacher) as url, ThreadPoolExecutor(2) as pool:
        settings = {
            "started": ("rollout.group_size=1", "rollout.batch_size=8"),
            "served": (f"teacher.urls=[{url}]", *mixed),
        }
        runs = [
            pool.submit(
                run,
                "recipe",
                "run",
                "arithmetic_grpo",
                *overrides(tiny_model, tmp_path, name, *more, *DISTILL),
                f"teacher.model={teacher}",
            )
            for name, more in settings.items()
        ]
        outputs = [one.result() for one in runs]
    assert [o.returncode for o in outputs] == [0, 0], "".join(o.stdout for o in outputs)
    assert "kl to teacher" in outputs[0].stdout and processes_of(tmp_path) == []
    assert (tmp_path / "started" / "logs" / "teacher-0.log").is_file()
    assert not (tmp_path / "served" / "logs" / "teacher-0.log").exists()
    assert [r["train/signal"] for r in metrics(tmp_path / "started")[1:]] == [1.0] * 3
    reference = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    for name in settings:
        assert all(r["distill/reverse_kl"] > 0 for r in metrics(tmp_path / name)[1:])
        lines = (tmp_path / name / "episodes.jsonl").read_text().splitlines()
        for line in lines[:4]:
            compare(reference, Episode.model_validate_json(line).trajectories["assistant"])


@torch.no_grad()
def compare(reference: torch.nn.Module, trajectory: Trajectory) -> None:
    """The recorded teacher logprobs and those of the plain model, given the whole conversation."""
    ids, told, sampled = [], [], []
    for node in trajectory.nodes:
        ids += node.token_ids
        told += node.teacher_logprobs or [0.0] * len(node.token_ids)
        sampled += node.loss_mask
    rows = reference(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    known = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0] * torch.tensor(sampled[1:])
    assert sum(sampled) > 0
    torch.testing.assert_close(torch.tensor(told[1:], dtype=torch.float64), known, atol=1e-4, rtol=0)


def test_a_teacher_of_other_tokens_is_refused_before_anything_starts(
    tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    (other / TOKENIZER).write_text((teacher / TOKENIZER).read_text().replace("<|im_end|>", "<|eot|>"))
    result = run(
        "recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "other-run", *DISTILL),
        f"teacher.model={other}",
    )  # fmt: skip
    assert result.returncode == 2 and "1 tokens differ ('<|im_end|>' is" in result.stdout, result.stdout
    assert not (tmp_path / "other-run").exists()


def test_a_served_teacher_that_is_not_there_is_one_message(tiny_model: Path, teacher: Path, tmp_path: Path) -> None:
    more = (f"teacher.model={teacher}", "teacher.urls=[http://127.0.0.1:9]")
    result = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "nobody", *DISTILL, *more))
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
    assert "the teacher does not score: http://127.0.0.1:9/generate: ClientConnectorError" in result.stdout
