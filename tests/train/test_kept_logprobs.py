"""What a run keeps of the trainer's logprobs is what the model says of these tokens, on one rank and on two."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

from agentrl.core.episode import Episode
from agentrl.core.trainer_logprobs import FILE, read_gaps
from tests.train.measured_steps import make_batch, make_learner, make_sequences, plain
from tests.train.test_first_mismatch import fault, served, trainer_of
from tests.train.toy_policy import make_engine


def key(episode: Episode) -> dict[str, object]:
    return {"group_id": episode.group_id, "index": episode.index}


def test_the_first_group_of_each_step_is_kept(tiny_model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    """The server's logprobs are one nat too small, so each gap is -1."""
    engine = make_engine(tiny_model, {})
    batch = served(engine, 0, fault("shifted", tiny_model, tmp_path))
    again = [one.model_copy(update={"group_id": f"{one.group_id}-again"}) for one in batch]
    trainer, _ = trainer_of(tiny_model, tmp_path, batch, again, max_first_mismatch=None, learning_rate=1e-9)
    trainer.run()
    lines = (tmp_path / FILE).read_text().splitlines()
    first = [one for one in batch if one.group_id == batch[0].group_id]
    assert len(lines) == 2 * len(first), "one group of several, and two steps"
    for one in first:
        (found,) = [read_gaps(tmp_path, key(one))["assistant"]]
        answer = one.trajectories["assistant"].nodes[1]
        assert list(found) == [1], "the prompt was not sampled"
        assert found[1] == pytest.approx([-1.0] * len(answer.token_ids), abs=2e-3)
    assert read_gaps(tmp_path, key(batch[-1])) == {}


@pytest.mark.parametrize("groups", [0, 100])
def test_how_many_is_a_key(groups: int, tiny_model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    batch = served(make_engine(tiny_model, {}), 0)
    trainer, _ = trainer_of(tiny_model, tmp_path, batch)
    trainer._logprobs._groups = groups
    trainer.run()
    kept = [read_gaps(tmp_path, key(one)) for one in batch]
    assert sum(map(bool, kept)) == (len(batch) if groups else 0)


def test_a_full_disk_costs_these_lines_alone(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = served(make_engine(tiny_model, {}), 0)
    trainer, client = trainer_of(tiny_model, tmp_path, batch, served(make_engine(tiny_model, {}), 1))
    (tmp_path / FILE).mkdir()  # opening it fails as a disk that is full does
    trainer.run()
    assert client.recorded == [(1, False), (2, True)]
    assert capsys.readouterr().out.count(f"{FILE} cannot be written") == 1


def test_two_ranks_find_the_same_and_it_is_the_models(tiny_model: Path, tmp_path: Path) -> None:
    make_sequences.cache_clear()
    spawn(_rank, (tiny_model, tmp_path), nprocs=2)
    own, other = (np.load(tmp_path / f"{rank}.npy") for rank in range(2))
    assert np.array_equal(own, other)
    sequences = make_sequences(tiny_model, 0.0, (0,))
    expected = [
        (float(number), float(at), logprob)
        for number, (one, values) in enumerate(zip(sequences, plain(tiny_model, sequences), strict=True))
        if number in (0, 1, 5)
        for at, (logprob, _) in zip(np.flatnonzero(one.loss_mask), values, strict=True)
    ]
    assert own == pytest.approx(np.array(expected), abs=1e-4)


def _rank(rank: int, folder: Path, place: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    engine = make_learner(folder, init_device_mesh("cpu", (2,)), {})
    engine.update(make_batch(make_sequences(folder, 0.0, (0,)), ()) if rank == 0 else None, 0.0)
    assert {0, 1, 5} <= set(engine.measured.sequences())
    np.save(place / f"{rank}.npy", engine.measured.of_sequences([0, 1, 5]))
    dist.destroy_process_group()
