"""Measures the machine at hand for ``agentrl plan --probe``: products, memory, an update, decoding.

Guarantees: ends within the given seconds, but for the end of a process that is stopped; what was not reached stays
assumed. The update is the trainer's own and decoding the embedded engine's, on a model of the recipe's config with few
layers and random weights; efficiencies are solved for that model's own operation counts, so they hold for all layers.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import Any

from agentrl.bench.sides import Side
from agentrl.config.recipe import Recipe
from agentrl.host.cpu_env import CPU_ENV
from agentrl.models.sizes import Decoder
from agentrl.plan.assumptions import Assumptions
from agentrl.plan.memory import BYTES, GB
from agentrl.plan.mesh import Mesh
from agentrl.plan.times import TERA, Case, optimizer_seconds
from agentrl.plan.work import Work, work_of

MOST_LAYERS = 4
MOST_TOKENS = 2048  # of an update on a CPU; 16,384 on a GPU
FIRST, UPDATE = 0.6, 0.25  # shares of the seconds: for the process of the update, and for its timed updates
REPEATS = 3  # of a decoding; the shortest counts
BUSY = 0.5  # other processes' load over the cores, from which the probe says that it was disturbed
LEAST = 1e-6


@dataclass
class Found:
    """Measurements, as values of assumptions with their sources."""

    values: dict[str, float]
    sources: dict[str, str]
    disturbed: str = ""

    @property
    def clock(self) -> str:
        """``cpu`` where other processes are busy, else ``wall``."""
        return "cpu" if self.disturbed else "wall"

    def note(self, source: str, **values: float) -> None:
        """Keep values that come from one measurement."""
        self.values |= {name: value for name, value in values.items() if value > 0}
        self.sources |= dict.fromkeys(values, f"measured: {source}{self.disturbed}")


def measured(
    recipe: Recipe, decoder: Decoder, config: dict[str, Any], known: Assumptions, seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Measures within so many seconds.

    Args:
        recipe: Recipe with resolved dtypes and device.
        decoder: Sizes of the model.
        config: The model's ``config.json``.
        known: Assumptions; their lengths say what is tried.
        seconds: Most seconds.

    Returns:
        Values of assumptions and their sources; those that were not reached are absent.
    """
    device = recipe.launch.device
    end, found = time.monotonic() + seconds, Found({}, {}, _load(device))
    few = replace(decoder, layers=min(decoder.layers, MOST_LAYERS))
    few = replace(few, sparse_layers=min(few.layers, decoder.sparse_layers) if decoder.sparse_layers else 0)
    case = Case(recipe, few, probe_work(recipe, known), known)
    with tempfile.TemporaryDirectory() as folder:
        task = {"config": config | {"num_hidden_layers": few.layers}, "recipe": recipe.model_dump(mode="json")}

        def update(side: Side) -> None:
            _machine(side, case, found)
            _update(side, case, task, seconds * UPDATE, found)

        def decode(side: Side) -> None:
            _decode(side, replace(case, known=known.replaced(found.values, "measured")), slots, found)

        _run(update, "agentrl.bench.probe_side", str(folder), device, seconds=seconds * FIRST)
        if (Path(folder) / "config.json").is_file():
            slots = min(recipe.inference.max_running, int(case.work.episodes))
            arguments = ("compiled", str(folder), device, str(slots))
            _run(decode, "agentrl.bench.engine_sides", *arguments, seconds=end - time.monotonic())
    return found.values, found.sources


def probe_work(recipe: Recipe, known: Assumptions) -> Work:
    """Returns the work of the update that is tried: groups of the recipe, as many as a micro-batch takes."""
    whole = work_of(recipe, known)
    most = MOST_TOKENS if recipe.launch.device == "cpu" else 16384
    most = min(most, recipe.trainer.tokens_per_microbatch, max(whole.computed, 64))
    group = whole.prompt + whole.members * whole.answer
    scale = min(1.0, most / group)
    prompt, answer = max(1, int(whole.prompt * scale)), max(1, int(whole.answer * scale))
    groups = max(1, int(most // (prompt + whole.members * answer)))
    return Work(groups=groups, members=whole.members, prompt=prompt, lengths=(float(answer),))


def _load(device: str) -> str:
    """Says that other processes are busy on the cores that are measured, where they are."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if device != "cpu" or load <= BUSY * cores:
        return ""
    return f" (CPU time over {cores} cores: other processes were busy, load {load:.1f})"


def _run(work: Callable[[Side], None], module: str, *arguments: str, seconds: float) -> None:
    """Measures with a side that is ended when its time is over; what it did not reach is left out."""
    side = Side(module, *arguments, env=CPU_ENV)
    timer = Timer(max(0.1, seconds), side.end)
    timer.start()
    try:
        side.hear()
        work(side)
    except RuntimeError:
        if timer.is_alive():  # it ended by itself
            raise
    finally:
        timer.cancel()
        side.end()


def _machine(side: Side, case: Case, found: Found) -> None:
    recipe = case.recipe
    rates = {dtype: side.do({"what": "products", "dtype": dtype, "clock": found.clock}) for dtype in
             {recipe.trainer.dtype, recipe.inference.dtype}}  # fmt: skip
    for name, dtype in (("peak_tflops", recipe.trainer.dtype), ("serving_tflops", recipe.inference.dtype)):
        found.note(f"products of matrices, {dtype}, {rates[dtype]['of']}", **{name: rates[dtype]["flops"] / TERA})
    copied = side.do({"what": "copy", "clock": found.clock})
    found.note("copies in memory, read and written bytes", bandwidth_gbs=copied["rate"] / GB)
    host = side.do({"what": "host", "clock": found.clock})
    share = case.known["link_share"]
    found.note("a file in shared memory, written and read", host_gbs=host["rate"] / GB / share)
    if recipe.launch.device == "cuda":
        found.note("the card", memory_gb=side.do({"what": "memory"})["nbytes"] / GB)


def _update(side: Side, case: Case, task: dict[str, Any], seconds: float, found: Found) -> None:
    work = case.work
    asked = task | {"what": "update", "groups": work.groups, "members": work.members, "prompt": work.prompt,
                    "answer": work.answer, "seconds": seconds, "clock": found.clock}  # fmt: skip
    result = side.do(asked)
    here = replace(case, known=case.known.replaced(found.values, "measured"))
    spent = max(LEAST, result["seconds"] - optimizer_seconds(here, Mesh()))
    flops = 3 * case.decoder.forward_flops(work.computed, work.predicted, work.pairs)
    rate = flops / spent / TERA
    text = f"an update of {work.computed:,.0f} tokens with {case.decoder.layers} layers, {result['seconds']:.3g} s"
    found.note(text, mfu=rate / here.known["peak_tflops"])


def _decode(side: Side, case: Case, slots: int, found: Found) -> None:
    """Solves for the efficiencies of prompts, of one row and of many rows."""
    work, known = case.work, case.known
    prompt = int(max(1, min(work.prompt, 256)))
    new = int(max(4, min(32, work.answer, case.recipe.inference.context_length - prompt - 4)))

    seeds = itertools.count()

    def once(count: int, tokens: int) -> float:
        task = {"what": "speed", "count": count, "seed": next(seeds), "new": tokens, "lengths": [prompt, prompt]}
        before = side.cpu_seconds()
        wall = count * tokens / side.do(task)["value"]
        return wall if found.clock == "wall" else (side.cpu_seconds() - before) / (os.cpu_count() or 1)

    def seconds(count: int, tokens: int) -> float:
        return min(once(count, tokens) for _ in range(REPEATS))

    def step(count: int) -> tuple[float, float]:
        first = seconds(count, 2)
        return max(LEAST, (seconds(count, 2 + new) - first) / new), first

    once(slots, 2)  # warms up
    width = BYTES[case.recipe.inference.dtype]
    context = prompt + new / 2
    one, _ = step(1)
    reading = case.decoder.read(1) * width + context * case.decoder.kv_bytes(width)
    mbu = reading / one / (known["bandwidth_gbs"] * GB)
    found.note(f"a decode step of one row, {one * 1e3:.3g} ms", mbu=mbu, decode_step_ms=LEAST)
    many, first = step(slots)
    cache = slots * context * case.decoder.kv_bytes(width) / (known["bandwidth_gbs"] * GB * mbu)
    flops = case.decoder.forward_flops(slots, slots, slots * context)
    peak = known["serving_tflops"] * TERA
    computing = max(many * 0.1, many - cache)
    found.note(f"a decode step of {slots} rows, {many * 1e3:.3g} ms", decode_mfu=flops / computing / peak)
    prompts = case.decoder.forward_flops(slots * prompt, slots, slots * prompt**2 / 2)
    filled = first - many  # the first token comes with the prompt
    if filled > 0.1 * first:
        found.note(f"{slots} prompts of {prompt} tokens, {filled:.3g} s", prefill_mfu=prompts / filled / peak)
