"""Measures updates of larger models and contexts on all GPUs of a machine: model-FLOPs utilisation and memory.

Guarantees: each case is a process group of its own, started by torchrun, whose ranks load random weights of the named
shape onto their mesh by the code of a run's trainer; an update takes as long as on its slowest rank, and memory is that
of the rank with most; what does not fit, or needs another number of ranks, is named and left out.

``python -m agentrl.bench.bench_gpu_mesh --tiny --device cpu --ranks 4`` runs the same code with a small model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from agentrl.bench.gpu_sides import EIGHT, EIGHT_LONG, FULL, LONG, TINY, Size
from agentrl.bench.model_flops import peak_tflops
from agentrl.bench.report import json_line
from agentrl.config.errors import ConfigError

NO_CUDA = "no CUDA device: nothing measured"
OUT_OF_MEMORY = "out-of-memory"  # file that a rank leaves
SIDE = "agentrl.bench.gpu_mesh_side"
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A model and a batch on a mesh.

    Attributes:
        size: Size of the model and the batch.
        mesh: Keys of the trainer; ranks that they leave are shards.
    """

    size: Size
    mesh: Mapping[str, int] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """Number of ranks that must divide those of the machine."""
        return self.mesh.get("tensor_parallel", 1) * self.mesh.get("context_parallel", 1)


TENSOR_AND_CONTEXT = {"tensor_parallel": 2, "context_parallel": 2}
CASES = {
    "1.5b": Case(FULL),
    "1.5b_32k": Case(LONG),
    "8b": Case(EIGHT),
    "8b_32k": Case(EIGHT_LONG),
    "8b_32k_tp2_cp2": Case(EIGHT_LONG, TENSOR_AND_CONTEXT),
}
TINY_CASES = {"tiny": Case(TINY), "tiny_tp2_cp2": Case(TINY, TENSOR_AND_CONTEXT)}


def run(repeats: int = 5, device: str = "cuda", ranks: int | None = None, cases: Mapping[str, Case] = CASES) -> Figures:
    """Measure all cases.

    Args:
        repeats: Timed updates of each case, after those that warm up.
        device: ``cuda`` or ``cpu``.
        ranks: Number of ranks; ``None``: one on each GPU, a single one on a CPU.
        cases: Cases by name.

    Returns:
        With the name of its case before each: ``update_s``; ``tflops`` of a rank, and ``mfu``, its share of the peak,
        if that is known; ``tokens_s``, computed tokens of all ranks; ``peak_gib``.

    Raises:
        ConfigError: There is no such device.
        RuntimeError: A case failed for another reason than memory.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{NO_CUDA}; in small: python -m agentrl.bench.bench_gpu_mesh --tiny --device cpu --ranks 4")
    count = ranks or default_ranks(device)
    peak = peak_tflops(torch.cuda.get_device_name(0)) if device == "cuda" else None
    figures: Figures = {}
    for name, case in cases.items():
        if count % case.least:
            print(f"{name}: needs a multiple of {case.least} ranks, left out on {count}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = _measure(case, name, count, device, repeats, Path(folder))
        if peak is not None and found:
            found["mfu"] = [one / peak for one in found["tflops"]]
        figures |= {f"{name}_{key}": values for key, values in found.items()}
    return figures


def default_ranks(device: str) -> int:
    """Returns the number of GPUs; 1 on a CPU."""
    return torch.cuda.device_count() if device == "cuda" else 1


def _measure(case: Case, name: str, ranks: int, device: str, repeats: int, folder: Path) -> Figures:
    """Runs a case; returns its figures, none where it does not fit."""
    task = {"size": asdict(case.size), "mesh": dict(case.mesh), "device": device, "repeats": repeats}
    (folder / "task.json").write_text(json.dumps(task))
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, "--log-dir", str(folder / "torchrun"), "--module", SIDE, str(folder)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if (folder / OUT_OF_MEMORY).exists():
        print(f"{name}: out of memory on {ranks} ranks, left out", file=sys.stderr)
        return {}
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stdout[-4000:]}")
    each = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    seconds = [max(times) for times in zip(*(one["seconds"] for one in each), strict=True)]
    flops, tokens = each[0]["flops"], each[0]["tokens"]
    return {
        "update_s": seconds,
        "tflops": [flops / one / ranks / 1e12 for one in seconds],
        "tokens_s": [tokens / one for one in seconds],
        "peak_gib": [max(one["peak_gib"] for one in each)],
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``scripts/gpu_bench.sh mesh``: prints a line that names the GPUs, and a line of JSON."""
    parser = argparse.ArgumentParser(prog="agentrl.bench.bench_gpu_mesh")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, help="ranks; by default one on each GPU")
    parser.add_argument("--tiny", action="store_true", help="test the code with a small model; ignore its figures")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(NO_CUDA)
        return 0
    card = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU"
    print(f"{args.ranks or default_ranks(args.device)} x {card}, torch {torch.__version__}", flush=True)
    print(json_line(run(args.repeats, args.device, args.ranks, TINY_CASES if args.tiny else CASES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
