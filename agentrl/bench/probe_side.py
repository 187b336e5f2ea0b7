"""Process of ``agentrl plan --probe`` that measures products, copies and an update of the trainer.

``python -m agentrl.bench.probe_side FOLDER DEVICE`` reads a line of JSON for each task from stdin and answers with one
line of JSON on stdout. The model of the update is left in FOLDER, for the engine.
"""

import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.bench.sides import answer, requests

SIDE = {"cpu": 1024, "cuda": 8192}  # rows of the multiplied matrices
COPIED = {"cpu": 128 << 20, "cuda": 1 << 30}  # bytes, more than a cache holds
REPEATS, SECONDS = 25, 3.0  # most repeats and seconds of a measurement


def _timed(work: Callable[[], Any], device: str, clock: str, seconds: float = SECONDS) -> float:
    """Returns the least seconds of ``work``, which other processes disturb least; once more to warm up.

    Args:
        work: Function that is timed.
        device: ``cpu`` or ``cuda``.
        clock: ``wall``, or ``cpu`` for this process's CPU time over its threads: what the wall clock would show if no
            other process took the cores.
        seconds: Wall-clock seconds after which no repeat begins.
    """
    import torch

    def now() -> float:
        return time.perf_counter() if clock == "wall" else time.process_time() / torch.get_num_threads()

    best, end = math.inf, time.perf_counter() + seconds
    for repeat in range(REPEATS + 1):
        begun, started = now(), time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat:
            best = min(best, now() - begun)
        if repeat and 2 * time.perf_counter() - started > end:
            break
    return best


def products(dtype: str, device: str, clock: str) -> dict[str, Any]:
    """Measures the FLOP/s of a product of square matrices."""
    import torch

    side = SIDE[device]
    left, right = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return {"flops": 2 * side**3 / _timed(lambda: left @ right, device, clock), "of": f"{side} x {side}"}


def copies(device: str, clock: str) -> dict[str, Any]:
    """Measures the bytes per second, read and written, of a copy in memory."""
    import torch

    source = torch.zeros(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"rate": 2 * source.nbytes / _timed(lambda: target.copy_(source), device, clock)}


def host(device: str, clock: str) -> dict[str, Any]:
    """Measures the bytes per second of a file in shared memory, written and then read to the device."""
    import torch

    source = torch.zeros(COPIED["cpu"], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    place = Path("/dev/shm" if Path("/dev/shm").is_dir() else ".") / f"agentrl-probe-{os.getpid()}"

    def both() -> None:
        place.write_bytes(source.cpu().numpy().tobytes())
        target.copy_(torch.frombuffer(bytearray(place.read_bytes()), dtype=torch.uint8))

    try:
        return {"rate": 2 * source.nbytes / _timed(both, device, clock)}
    finally:
        place.unlink(missing_ok=True)


def update(task: dict[str, Any], folder: Path, device: str) -> dict[str, Any]:
    """Measures an update of the trainer with a model of the given config."""
    import torch
    import torch.distributed as dist

    from agentrl.config.recipe import Recipe
    from agentrl.train.__main__ import load_for, prepared
    from agentrl.train.learner import PolicyLearner
    from agentrl.train.mesh import RankMesh
    from agentrl.train.policy import Policy
    from agentrl.train.row_attention import choose_attention

    recipe = plain(Recipe.model_validate(task["recipe"]))
    torch.set_num_threads(recipe.trainer.threads or os.cpu_count() or 1)
    save_model(task["config"], folder)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = load_for(recipe, folder)
    place = torch.device(device)
    choose_attention(model, recipe.trainer, place)
    policy = Policy(model, 1.0, recipe.trainer.logprob_chunk)
    policy = prepared(policy, recipe.trainer, RankMesh.of_world(place), place)
    learner = PolicyLearner(policy, None, recipe.trainer, place)
    batch = batch_of(task)
    return {"seconds": _timed(lambda: learner.update(batch, 1e-6), device, task["clock"], task["seconds"])}


def plain(recipe: Any) -> Any:
    """Returns the recipe without what a probe does not measure: adapters, reference, critic, compiled layers."""
    keys = {"kl_coef": 0.0, "advantage": "group", "lora_rank": None, "compile": False, "cpu_offload": False}
    trainer = recipe.trainer.model_copy(update=keys | {"minibatches": 1, "proximal": "behavior", "metric_share": 0.0})
    return recipe.model_copy(update={"trainer": trainer})


def save_model(config: dict[str, Any], folder: Path) -> None:
    """Writes a model with random weights and a tokenizer that nothing is encoded with."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    kept = {key: value for key, value in config.items() if key not in ("layer_types", "model_type")}
    made = AutoConfig.for_model(config["model_type"], **kept)
    disable_progress_bar()
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def batch_of(task: dict[str, Any]) -> Any:
    """Makes a batch of random tokens; its logprobs fit random weights about."""
    from agentrl.bench.made_batch import TrainSequence, made_batch

    rng, vocabulary = random.Random(0), task["config"]["vocab_size"]
    prompt, length = int(task["prompt"]), int(task["answer"])
    sequences = []
    for group in range(int(task["groups"])):
        start = [rng.randrange(vocabulary) for _ in range(prompt)]
        for _ in range(int(task["members"])):
            ids = start + [rng.randrange(vocabulary) for _ in range(length)]
            logprobs, advantages = [-math.log(vocabulary)] * len(ids), [rng.gauss(0, 1)] * len(ids)
            sequences.append(
                TrainSequence(ids, [0] * prompt + [1] * length, logprobs, advantages, 1 / length, group=group)
            )
    return made_batch(sequences, len(sequences), 1.0)


def serve(folder: Path, device: str) -> None:
    """Answers tasks: ``products``, ``copy``, ``host``, ``memory``, ``update``."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    work: dict[str, Callable[[Any], dict[str, Any]]] = {
        "products": lambda task: products(task["dtype"], device, task["clock"]),
        "copy": lambda task: copies(device, task["clock"]),
        "host": lambda task: host(device, task["clock"]),
        "memory": lambda task: {"nbytes": torch.cuda.get_device_properties(0).total_memory},
        "update": lambda task: update(task, folder, device),
    }
    answer(ready=True)
    for task in requests():
        answer(**work[task["what"]](task))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
