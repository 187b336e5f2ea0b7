"""Measures a whole GRPO update on one GPU: model-FLOPs utilisation, memory with and without chunked logprobs, decoding.

Guarantees: the model has the shape of Qwen2-1.5B and random weights (float32, computed in bfloat16 under FSDP2); 8
groups of 8 answers are packed in micro-batches of 16k tokens; an update is timed from a batch of sequences to the end
of its optimizer step. :mod:`agentrl.bench.model_flops` defines the counted operations.

``python -m agentrl.bench.bench_gpu --tiny --device cpu`` runs the same code with a small model, in seconds.
"""

import argparse
import contextlib
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from agentrl.bench.gpu_sides import (
    FULL,
    TINY,
    Head,
    Size,
    heads,
    make_batch,
    make_engine,
    make_model,
    measured,
    plain_loss,
    save_tokenizer,
)
from agentrl.bench.model_flops import Work, peak_tflops, update_flops
from agentrl.bench.report import json_line
from agentrl.config.errors import ConfigError

WARM_UP = 2  # updates; the second may compile again for a second shape
NO_CUDA = "no CUDA device: nothing measured"
Figures = dict[str, list[float]]


def run(repeats: int = 5, device: str = "cuda", size: Size = FULL) -> Figures:
    """Measure everything; measurements that do not fit the GPU's memory are named on stderr and left out.

    Args:
        repeats: Timed updates of each kind, after those that warm up.
        device: Torch device name.
        size: Size of model and batch.

    Returns:
        With compiled layers: ``mfu`` (if the GPU's peak is known), ``tflops``, ``tokens_s`` (computed tokens),
        ``trained_tokens_s``, ``update_s`` and ``peak_gib``. The same with the prefix ``checkpointed_`` for activation
        checkpointing without compilation, and with ``compiled_checkpointed_`` for both, if compiled layers alone do not
        fit. ``plain_head_peak_gib``: peak with checkpointing and all logits at once. For the output head alone,
        forward and backward: ``head_ms`` and ``head_extra_gib``, with the prefix ``plain_`` for all logits at once, and
        ``liger_`` if Liger is installed. ``decode_tokens_s``: tokens per second of the embedded engine.

    Raises:
        ConfigError: There is no such device.
    """
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{NO_CUDA}; in small: python -m agentrl.bench.bench_gpu --tiny --device cpu")
    torch.manual_seed(0)
    figures: Figures = {}

    def measure(name: str, stage: Callable[[], Figures]) -> None:
        try:
            figures.update(stage())
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory on this card, left out", file=sys.stderr)
        except ImportError as error:  # Liger's kernel for Hopper needs more packages
            print(f"{name}: {error}, left out", file=sys.stderr)
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            backend = "nccl" if place.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        measure("compiled", lambda: _update(size, place, repeats, "", compiled=True))
        if not figures:
            both = {"compiled": True, "checkpointed": True}
            measure("compiled, checkpointed", lambda: _update(size, place, repeats, "compiled_checkpointed_", **both))
        measure("checkpointed", lambda: _update(size, place, repeats, "checkpointed_", checkpointed=True))
        measure("plain head", lambda: _plain_update(size, place))
        for name, head in heads().items():
            measure(name, lambda name=name, head=head: _head(name, head, size, place, repeats))
        measure("decode", lambda: _decode(size, place, repeats, Path(folder)))
    return figures


def _update(size: Size, device: torch.device, repeats: int, prefix: str, **choices: bool) -> Figures:
    batch = make_batch(size)
    work = Work.of(batch, size.tokens)
    engine = make_engine(size, device, **choices)
    flops = update_flops(engine.policy.model, work)
    peak = peak_tflops(_card(device))
    for _ in range(WARM_UP):
        engine.update(batch, 1e-6)
    figures: Figures = {}
    for _ in range(repeats):
        with measured(device) as found:
            metrics = engine.update(batch, 1e-6)
        if metrics["train/skipped"]:
            raise RuntimeError("the update was skipped: its gradient is not finite")
        seconds = found["seconds"]
        values = {
            "tflops": flops / seconds / 1e12,
            "tokens_s": work.tokens / seconds,
            "trained_tokens_s": work.trained / seconds,
            "update_s": seconds,
            "peak_gib": found["peak_gib"],
        }
        if peak is not None:
            values["mfu"] = values["tflops"] / peak
        for key, value in values.items():
            figures.setdefault(prefix + key, []).append(value)
    return figures


def _plain_update(size: Size, device: torch.device) -> Figures:
    """Peak memory of an update with all logits of a micro-batch at once, to compare with ``checkpointed_peak_gib``."""
    batch, engine = make_batch(size), make_engine(size, device, checkpointed=True)
    with mock.patch("agentrl.train.head.chunked_loss", plain_loss):
        engine.update(batch, 1e-6)
        with measured(device) as found:
            engine.update(batch, 1e-6)
    return {"plain_head_peak_gib": [found["peak_gib"]]}


def _head(name: str, head: Head, size: Size, device: torch.device, repeats: int) -> Figures:
    vocabulary, width = size.shape["vocab_size"], size.shape["hidden_size"]
    hidden = torch.randn(size.tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (size.tokens,), device=device)
    figures: Figures = {}
    for repeat in range(repeats + 1):
        hidden.grad = weight.grad = None
        with measured(device) as found:
            head(hidden, weight, targets, _sum, temperature=0.9, chunk=size.chunk).backward()
        if repeat:
            figures.setdefault(f"{name}_ms", []).append(1000 * found["seconds"])
            figures.setdefault(f"{name}_extra_gib", []).append(found["peak_gib"] - found["before_gib"])
    return figures


def _sum(rows: slice, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    return logprobs.sum()


def _decode(size: Size, device: torch.device, repeats: int, folder: Path) -> Figures:
    """New tokens per second of the embedded engine, with short prompts."""
    from agentrl.bench.engine_sides import SHORT_PROMPT, make_prompts, start, tokens_a_second

    save_tokenizer(folder)
    make_model(size, device).to(torch.bfloat16).save_pretrained(folder)
    slots, length = size.decode
    engine = start(str(folder), slots, str(device), compiled=False)
    speeds = []
    try:
        for repeat in range(repeats + 1):
            prompts = make_prompts(size.shape["vocab_size"], slots, repeat, SHORT_PROMPT)
            speeds.append(tokens_a_second(engine, prompts, [length] * slots))
    finally:
        engine.stop(timeout=60)
    return {"decode_tokens_s": speeds[1:]}


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``scripts/gpu_bench.sh``: prints a line that names the GPU, and a line of JSON."""
    parser = argparse.ArgumentParser(prog="agentrl.bench.bench_gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="test the code with a small model; ignore its figures")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(NO_CUDA)
        return 0
    print(f"{_card(device)}, torch {torch.__version__}", flush=True)
    print(json_line(run(args.repeats, args.device, TINY if args.tiny else FULL)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
