"""A training that is saved and resumed on two ranks.

``python -m tests.train.saving MODEL STORE RANK RANKS OUT`` runs on one of several ranks, and fails where a promise of a
checkpoint does not hold there.
"""

import errno
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from agentrl.train import checkpoint_saver as module
from agentrl.train.checkpoint import load_checkpoint
from agentrl.train.checkpoint_saver import CheckpointFailed
from agentrl.train.random_state import save_random_state
from tests.train.adapting import make_engine, steps, weights
from tests.train.saved import save_whole


def main() -> None:
    """Save after two steps, go on, and go on from the checkpoint once more."""
    model, store, rank, ranks, out = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    engine, folder = make_engine(model, mesh, {}), Path(out)
    torch.manual_seed(rank), random.seed(rank)
    steps(engine, 0, 2)
    saved = save_whole(folder, 2, engine, {}, {"rollouts": b"x"})
    steps(engine, 2, 4)
    expected, drawn = weights(engine), (torch.rand(3).tolist(), random.random())
    resumed = make_engine(model, mesh, {})
    load_checkpoint(saved, resumed)
    steps(resumed, 2, 4)
    found = weights(resumed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), "not the same to the bit"
    assert (torch.rand(3).tolist(), random.random()) == drawn, "other random numbers"

    def full(*given: object) -> Path:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save_random_state(*given)  # type: ignore[arg-type]

    module.save_random_state = full
    try:
        save_whole(folder, 4, engine, {})
    except CheckpointFailed as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError(f"rank {rank} was not told")
    dist.barrier()
    assert [path.name for path in folder.glob("*step*")] == ["step-000002"]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
