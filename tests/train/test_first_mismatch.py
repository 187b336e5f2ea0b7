"""A run whose servers' logprobs are not the trainer's stops after its first step, and says what differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM

from agentrl.config.recipe import Recipe, TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode
from agentrl.train.first_mismatch import ENOUGH, FirstMismatch
from agentrl.train.trainer import Trainer, TrainingStopped
from tests.tiny import build_tiny_model
from tests.train.measured_steps import make_batch, make_learner, make_sequences
from tests.train.test_presets_learn import Nowhere
from tests.train.test_trainer_end import Batches
from tests.train.toy_policy import make_engine, sample

LIMIT = TrainerConfig().max_first_mismatch or 0.0


def served(engine: Any, version: int, wrong: Callable[[Tensor, Tensor], Tensor] | None = None) -> list[Episode]:
    """Samples episodes; ``wrong`` makes the server's logprobs from the logits and ids of each answer."""
    episodes = sample(engine.policy, version, torch.Generator().manual_seed(0))
    if wrong is None:
        return episodes
    for one in episodes:
        prompt, answer = one.trajectories["assistant"].nodes
        ids = torch.tensor([prompt.token_ids + answer.token_ids])
        answer.logprobs[:] = wrong(ids, torch.tensor(answer.logprobs)).tolist()
    return episodes


def trainer_of(model: Path, folder: Path, *batches: list[Episode], **settings: Any) -> tuple[Trainer, Batches]:
    plain = {"last": False, "done": 0.0, "epochs": 0, "epochs_before": 0, "oldest_version": None}
    facts = [plain] * (len(batches) - 1) + [plain | {"last": True}]
    client = Batches(*(Columns.of(one).to_bytes(**more) for one, more in zip(batches, facts, strict=True)))
    section = {"trainer": {"save_seconds": None, **settings}}
    recipe = Recipe.model_validate({"model": {"name": "x"}, "env": {"id": "arithmetic"}, **section})
    trainer = Trainer(recipe, model, folder, make_engine(model, settings), Nowhere(), client)  # type: ignore[arg-type]
    trainer.save = lambda elapsed: None  # type: ignore[method-assign]
    trainer.export = lambda target: None  # type: ignore[method-assign]
    return trainer, client


@torch.no_grad()
def logprobs(folder: Path, ids: Tensor, temperature: float, count: int) -> Tensor:
    """Returns the logprobs of the last ``count`` ids under a model, at a temperature."""
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits[0]
    rows = (logits / temperature).log_softmax(-1)[:-1]
    return rows.gather(-1, ids[0, 1:, None])[-count:, 0]


FAULTS = ("shifted", "temperature", "another model")


def fault(kind: str, model: Path, folder: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """Makes a fake server's logprobs of sampled answers."""
    if kind == "shifted":
        return lambda ids, right: right - 1
    if kind == "temperature":
        return lambda ids, right: logprobs(model, ids, 0.5, len(right))
    other = build_tiny_model(folder / "other", seed=1)
    return lambda ids, right: logprobs(other, ids, 1.0, len(right))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_server_with_other_logprobs_stops_the_run(
    kind: str, tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model, {})
    batch = served(engine, 0, fault(kind, tiny_model, tmp_path))
    trainer, client = trainer_of(tiny_model, tmp_path, batch, batch)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.run()
    said = str(stopped.value)
    first = batch[0].trajectories["assistant"].nodes[1]
    assert f"token {first.token_ids[0]} at position 3 of sequence" in said or kind != "shifted", said
    assert "max_first_mismatch" in said and said.index("penalties") < said.index("temperature") < said.index("weights")
    assert not client.recorded and "\n" not in said


def test_an_ordinary_run_goes_on_and_is_judged_once(tiny_model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    engine = make_engine(tiny_model, {})
    wrong = served(engine, 1, fault("shifted", tiny_model, tmp_path))
    trainer, client = trainer_of(tiny_model, tmp_path, served(engine, 0), wrong)
    trainer.run()
    assert client.recorded == [(1, False), (2, True)]


def test_old_tokens_accuse_nobody_and_the_first_fresh_step_is_judged(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    engine, wrong = make_engine(tiny_model, {}), fault("shifted", tiny_model, tmp_path)
    trainer, client = trainer_of(tiny_model, tmp_path, *(served(engine, version, wrong) for version in (-1, 0, 2)))
    with pytest.raises(TrainingStopped):
        trainer.run()
    assert client.recorded == [(1, False), (2, False)]


def test_the_first_step_after_a_resume_is_judged_again(tiny_model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    engine = make_engine(tiny_model, {})
    wrong = served(engine, 3, fault("shifted", tiny_model, tmp_path))
    trainer, _ = trainer_of(tiny_model, tmp_path, *[wrong] * 4)
    trainer.step = 3  # as `resume` sets it
    with pytest.raises(TrainingStopped, match=r"mean .log ratio. is 1 over"):
        trainer.run()


@pytest.mark.parametrize("limit", [None, 5.0])
def test_the_limit_can_be_raised_or_turned_off(
    limit: float | None, tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model, {})
    wrong = served(engine, 0, fault("shifted", tiny_model, tmp_path))
    trainer, client = trainer_of(tiny_model, tmp_path, wrong, max_first_mismatch=limit)
    trainer.run()
    assert client.recorded == [(1, True)]


FEW = {"mismatch/tokens": ENOUGH - 1.0, "mismatch/tokens/age_0": ENOUGH - 1.0}


@pytest.mark.parametrize("changes", [FEW, {"mismatch/log_ratio": float("nan")}])
def test_few_tokens_and_what_is_not_finite_are_left_to_a_later_step(changes: dict[str, float]) -> None:
    found = {"mismatch/tokens": 99.0, "mismatch/tokens/age_0": 99.0, "mismatch/log_ratio": 9.0}
    check = FirstMismatch(LIMIT)
    measured = Batches  # not asked
    check.check({**found, **changes}, measured)  # type: ignore[arg-type]
    check.check({}, measured)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        check.check(found, measured)  # type: ignore[arg-type]


def test_two_ranks_stop_with_one_message_and_go_on_together(tiny_model: Path, tmp_path: Path) -> None:
    make_sequences.cache_clear()
    spawn(_rank, (tiny_model, tmp_path), nprocs=2)
    right, wrong = zip(*((tmp_path / f"{rank}.txt").read_text().split("\n") for rank in range(2)), strict=True)
    assert right == ("", "") and wrong[0] == wrong[1] and "mean |log ratio| is" in wrong[0]


def _rank(rank: int, folder: Path, place: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    said = []
    for spread in (0.0, 20.0):  # a tenth of it at age 0
        engine = make_learner(folder, mesh, {})
        batch = make_batch(make_sequences(folder, spread, (0,)), ()) if rank == 0 else None
        metrics = engine.update(batch, 0.0)
        try:
            FirstMismatch(LIMIT).check(metrics, engine.measured)
            said.append("")
        except TrainingStopped as stopped:
            said.append(str(stopped))
    (place / f"{rank}.txt").write_text("\n".join(said))
    dist.destroy_process_group()
