"""Checkpoints: what they hold, a full disk, and a run that goes on to the bit."""

import errno
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.load import load_recipe
from agentrl.core.columns import Columns
from agentrl.train import checkpoint_saver as module
from agentrl.train.checkpoint import load_checkpoint
from agentrl.train.checkpoint_saver import CheckpointFailed
from agentrl.train.checkpoint_state import EXPORTED, exported_step, latest_checkpoint, read_state, why_over
from agentrl.train.controller_client import ControllerError
from agentrl.train.first_mismatch import TrainingStopped
from agentrl.train.trainer import Trainer
from tests.end_to_end import ROOT, SECONDS
from tests.train.saved import save_whole
from tests.train.test_trainer_end import make_trainer
from tests.train.toy_policy import make_engine, sample

MORE = {"learning_rate": 1e-3, "kl_coef": 0.01, "reference": "ema", "reference_decay": 0.9}


def drawn() -> list[float]:
    return [
        torch.rand(1).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("settings", [MORE, {"learning_rate": 1e-3, "advantage": "gae", "scale_rewards": "none"}])
def test_the_same_batch_after_a_resume_gives_the_same_loss_to_the_bit(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, settings: dict[str, Any]
) -> None:
    def update(trainer: Trainer, version: int) -> dict[str, float]:
        trainer.step = version
        made = sample(make_engine(tiny_model, {}).policy, version, torch.Generator().manual_seed(version))
        return trainer.update(Columns.of(made), 1e-3)

    first, second = (make_trainer(tiny_model, tmp_path, dict(settings))[0] for _ in range(2))
    for version in range(2):
        update(first, version)
    random.gauss(0, 1), np.random.randn()  # the second number of a pair is part of the state
    saved = save_whole(tmp_path, 2, first.engine, {})
    expected = [update(first, version) for version in (2, 3)], drawn()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    load_checkpoint(saved, second.engine)
    assert ([update(second, version) for version in (2, 3)], drawn()) == expected
    assert expected[0][0]["train/loss"] != expected[0][1]["train/loss"]


@pytest.mark.parametrize("place", ["save_random_state", "write", "sync", "commit"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine = make_engine(tiny_model, {})
    save_whole(tmp_path, 1, engine, {}, {"rollouts": b"x"})
    monkeypatch.setattr(module, place, full)
    with pytest.raises(CheckpointFailed, match="No space left on device"):
        save_whole(tmp_path, 2, engine, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (tmp_path / "step-000001" / "rollouts").read_bytes() == b"x"


def test_a_disk_that_is_full_while_torch_writes_is_one_line(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_model, {})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(CheckpointFailed) as caught:
            save_whole(tmp_path, 2, engine, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_training_goes_on_without_a_checkpoint_and_stops_after_three(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    trainer, client, _ = make_trainer(
        tiny_model, tmp_path, {"save_every": 1, "total_steps": 9}, *({} for _ in range(9))
    )
    trainer.save = lambda elapsed: Trainer.save(trainer, elapsed)  # type: ignore[method-assign]
    client.checkpoint = lambda step: b""  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "write", full)
    with pytest.raises(TrainingStopped, match=r"could not be written.*after step 3.*No space left.*3 in a row"):
        trainer.run()
    assert [step for step, _ in client.recorded] == [1, 2, 3]
    assert capsys.readouterr().out.count("training goes on") == 2


def test_a_controller_that_cannot_write_its_journal_costs_the_checkpoint_alone(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, capsys: Any
) -> None:
    trainer, client, _ = make_trainer(tiny_model, tmp_path, {"save_every": 1, "total_steps": 2}, {}, {})
    trainer.save = lambda elapsed: Trainer.save(trainer, elapsed)  # type: ignore[method-assign]

    def refuse(step: int) -> bytes:
        raise ControllerError("journal.jsonl cannot be written: the disk is full")

    client.checkpoint = refuse  # type: ignore[attr-defined]
    trainer.run()
    assert client.finished and capsys.readouterr().out.count("the disk is full") == 2


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_checkpoint_that_is_replaced_is_there_at_every_moment(tmp_path: Path, moment: str) -> None:
    for name, mark in (("step-000003", "old"), (".partial-step-000003", "new"), ("step-000002", "older")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(json.dumps({"mark": mark}))
    if moment == "between":
        (tmp_path / "step-000003").rename(tmp_path / ".replaced-step-000003")
    elif moment == "after":
        module.commit(tmp_path / ".partial-step-000003", tmp_path / "step-000003")
    found = latest_checkpoint(tmp_path)
    assert found is not None and read_state(found)["mark"] == ("new" if moment == "after" else "old")


def test_a_run_that_was_killed_before_its_export_only_evaluates_and_exports(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    settings = {"total_steps": 2}
    first, client, _ = make_trainer(tiny_model, tmp_path, settings, {}, {})
    first.save = lambda elapsed: Trainer.save(first, elapsed)  # type: ignore[method-assign]
    client.checkpoint = lambda step: b"rollouts"  # type: ignore[attr-defined]
    first.run()
    second, client, done = make_trainer(tiny_model, tmp_path, dict(settings))
    second.resume()
    second.run()
    assert client.recorded == [(2, True)] and client.finished and done == [("export", 2)]
    parameters = zip(first.engine.policy.parameters(), second.engine.policy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in parameters)


def test_the_export_says_its_step_and_a_full_disk_leaves_none(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, _ = make_trainer(tiny_model, tmp_path, {})
    trainer.step = 7
    weights = list(trainer.engine.policy.model.named_parameters())
    monkeypatch.setattr(trainer.publisher, "gather", lambda: weights, raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(trainer.engine.policy.model, "save_pretrained", full)
        with pytest.raises(TrainingStopped, match=r"could not be written.*No space left.*--resume"):
            Trainer.export(trainer, tmp_path / "model")
    assert exported_step(tmp_path / "model") is None and list(tmp_path.iterdir()) == []
    Trainer.export(trainer, tmp_path / "model")
    assert exported_step(tmp_path / "model") == 7 and (tmp_path / "model" / EXPORTED).is_file()


def test_a_run_is_over_by_steps_epochs_or_time() -> None:
    recipe = load_recipe("arithmetic_grpo", ["trainer.total_steps=5", "trainer.time_budget=9"], device="cpu")
    assert why_over(recipe, {"step": 4}) is None
    assert "all its 5 steps" in str(why_over(recipe, {"step": 5}))
    assert "used up its 9 s in 4 steps" in str(why_over(recipe, {"step": 4, "spent_budget": 9.0}))


def test_two_ranks_resume_to_the_bit_and_both_learn_of_a_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    """What they hold is in tests.train.saving; one of them has no room, and neither waits for the other."""
    arguments = [sys.executable, "-m", "tests.train.saving", str(tiny_model), str(tmp_path / "rendezvous")]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), "2", str(tmp_path / "out")], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        output, _ = rank.communicate(timeout=SECONDS)
        assert rank.returncode == 0, output
