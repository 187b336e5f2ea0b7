"""Sides of :mod:`agentrl.bench.bench_mesh`: processes that fork ranks, or are ranks of torchrun.

``python -m agentrl.bench.mesh_sides load|export MODEL FOLDER`` forks four ranks, ``step MODEL FOLDER`` is one of two
ranks of torchrun. Each writes its measurements to ``FOLDER/RANK.json``.
"""

import json
import os
import random
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 4
POLL_SECONDS = 0.002
GROUPS, MEMBERS, PROMPT, ANSWER = 2, 4, 100, 60


def on_ranks(function: Callable[[int], None]) -> None:
    """Forks ranks that meet over gloo, and waits for them.

    Raises:
        RuntimeError: One of them failed.
    """
    import torch.distributed as dist

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    pids = []
    for rank in range(RANKS):
        if not (pid := os.fork()):
            where = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in where.items()}, MASTER_ADDR="127.0.0.1")
            code = 1
            try:
                dist.init_process_group("gloo", timeout=timedelta(seconds=300))
                function(rank)
                dist.barrier()
                code = 0
            finally:  # the parent's code must not go on here, whatever was raised
                if code:
                    traceback.print_exc()
                os._exit(code)
        pids.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise RuntimeError("a rank failed")


def anonymous() -> int:
    """Returns the bytes of this process's memory that are not of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak:
    """Measures the largest anonymous memory while a block runs, above what was there before."""

    def __enter__(self) -> "Peak":
        self.start, self.bytes, self._over = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self.bytes = max(self.bytes, anonymous() - self.start)

    def __exit__(self, *of_error: Any) -> None:
        self._over.set()
        self._thread.join()


def recipe_of(model: str) -> Any:
    """Returns the recipe of a float32 training of a model."""
    from agentrl.config.recipe import Recipe

    trainer = {"dtype": "float32", "nproc": RANKS, "tokens_per_microbatch": 1024, "attention": "packed"}
    return Recipe.model_validate({"model": {"name": model}, "env": {"id": "unused"}, "trainer": trainer})


def load(model: str, folder: str) -> None:
    """Measures the peak of each rank's memory while it loads, over its shard."""
    import torch

    from agentrl.train.mesh import RankMesh
    from agentrl.train.policy import Policy, shard
    from agentrl.train.sharded_loading import load_sharded
    from agentrl.weights.gather import own_part

    def measure(rank: int) -> None:
        mesh = RankMesh.of_world(torch.device("cpu"))
        with Peak() as peak:
            begun = time.perf_counter()
            policy = load_sharded(
                Path(model),
                mesh,
                lambda loaded: Policy(loaded, 1.0, 256),
                lambda policy: shard(policy, mesh.fsdp, torch.float32),
                torch.float32,
            )
            seconds = time.perf_counter() - begun
        own = sum(own_part(one).numel() * 4 for one in policy.parameters())
        _write(folder, rank, load_peak_vs_shard=peak.bytes / own, load_peak_mb=peak.bytes / 1e6, load_s=seconds)

    on_ranks(measure)


def export(model: str, folder: str, repeats: str) -> None:
    """Times exports of which each rank writes its own parts, and exports that are gathered to one rank."""
    import torch
    import torch.distributed as dist

    from agentrl.train.__main__ import make_policy
    from agentrl.train.export import export_model, exported_weights
    from agentrl.train.mesh import RankMesh

    def measure(rank: int) -> None:
        device = torch.device("cpu")
        mesh = RankMesh.of_world(device)
        policy = make_policy(recipe_of(model), Path(model), mesh, device)
        weights = exported_weights(policy.model, adapter=False)
        found: dict[str, list[float]] = {"export_s": [], "gather_s": []}
        for repeat in range(int(repeats) + 1):
            for name in found:
                target = Path(folder) / "exported"
                dist.barrier()
                begun = time.perf_counter()
                export_model(
                    policy, weights, target, 1, Path(model), mesh, adapter=False, gather=name == "gather_s"
                )  # fmt: skip
                if repeat:
                    found[name].append(time.perf_counter() - begun)
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(target)
        _write(folder, rank, **found)

    on_ranks(measure)


def step(model: str, folder: str, repeats: str) -> None:
    """Times updates on two ranks of torchrun."""
    import torch
    import torch.distributed as dist

    from agentrl.bench.made_batch import TrainSequence, made_batch
    from agentrl.train.__main__ import make_policy
    from agentrl.train.learner import PolicyLearner
    from agentrl.train.mesh import RankMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    device = torch.device("cpu")
    mesh, recipe = RankMesh.of_world(device), recipe_of(model)
    policy = make_policy(recipe, Path(model), mesh, device)
    ids_known = min(1000, policy.model.config.vocab_size)
    engine = PolicyLearner(policy, None, recipe.trainer, device, None, mesh)
    seconds = []
    for repeat in range(int(repeats) + 1):
        rng = random.Random(repeat)
        sequences = []
        for number in range(GROUPS * MEMBERS):
            prompt = [(7 * number // MEMBERS + index) % ids_known for index in range(PROMPT)]
            ids = prompt + [rng.randrange(ids_known) for _ in range(ANSWER)]
            mask = [0] * PROMPT + [1] * ANSWER
            sequences.append(
                TrainSequence(ids, mask, [-5.0] * len(ids), [rng.gauss(0, 1)] * len(ids), group=number // MEMBERS)
            )
        dist.barrier()
        begun = time.perf_counter()
        engine.update(made_batch(sequences, 100.0) if mesh.rank == 0 else None, 1e-6)
        if repeat:
            seconds.append(time.perf_counter() - begun)
    _write(folder, mesh.rank, step_s=seconds)
    dist.destroy_process_group()


def _write(folder: str, rank: int, **values: Any) -> None:
    (Path(folder) / f"{rank}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    {"load": load, "export": export, "step": step}[sys.argv[1]](*sys.argv[2:])
