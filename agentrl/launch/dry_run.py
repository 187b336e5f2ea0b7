"""Describes a run without starting it: processes, devices, dtypes, tokens and memory.

Guarantees: the description is computed from the recipe and the model's ``config.json`` alone; nothing is started or
allocated, and no module is imported that does so. Memory is an estimate of lasting allocations and the largest buffers;
the text names the parts that it leaves out.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.config.hints import hints
from agentrl.config.mesh import check_mesh
from agentrl.config.recipe import Recipe
from agentrl.config.rollout import RolloutConfig
from agentrl.config.supervised import SUPERVISED, evaluates
from agentrl.inference.kinds.kind import server_kind
from agentrl.launch import placement
from agentrl.launch.model_shape import ModelShape, model_shape
from agentrl.launch.resolve import BYTES, decided, pushed_bytes, resolve
from agentrl.models.folder_check import is_plain, refused_config
from agentrl.weights.transport import BUFFERS, costs


@dataclass(frozen=True)
class MemoryItem:
    """Line of the memory estimate; ``nbytes`` is that of one process."""

    process: str
    what: str
    nbytes: int


def memory(recipe: Recipe, shape: ModelShape) -> list[MemoryItem]:
    """Estimates the memory of a resolved recipe's run, one item per lasting allocation or large buffer."""
    device = recipe.launch.device
    inference, trainer = recipe.inference, recipe.trainer
    items: list[MemoryItem] = []
    serves = trainer.type not in SUPERVISED or evaluates(recipe)
    if serves and not inference.urls:
        width = BYTES[inference.dtype]
        token = 2 * shape.layers * shape.kv_width * width
        cache = inference.max_running * inference.context_length * token
        items.append(MemoryItem("server", f"weights, {width} bytes each", shape.parameters * width))
        items.append(
            MemoryItem(
                "server", f"KV cache at most, {inference.max_running} x {inference.context_length} tokens", cache
            )
        )
        more = server_kind(inference.engine).more_memory(shape.parameters * width, token, device)
        items += [MemoryItem("server", what, nbytes) for what, nbytes in more]
        if trainer.lora_push == "adapter":
            items.append(MemoryItem("server", "copy of the base weights at most", shape.parameters * width))
    if trainer.type is None:
        return items
    width = BYTES[trainer.dtype]
    if trainer.type in SUPERVISED:
        return items + _supervised_memory(recipe, shape, width)
    shards = trainer.ranks // trainer.replicas
    share = -(-shape.parameters // shards)
    if trainer.lora_rank is None:
        items.append(MemoryItem("trainer rank", "parameters, gradients, two Adam moments in float32", 16 * share))
    else:
        adapters = -(-trainer.lora_rank * shape.linear_sides // shards)
        items.append(MemoryItem("trainer rank", "frozen parameters in float32", 4 * share))
        items.append(MemoryItem("trainer rank", "adapters at most, gradients, two Adam moments", 16 * adapters))
    if width != 4:
        items.append(MemoryItem("trainer rank", "parameters in bfloat16 for compute", 2 * shape.parameters))
    if trainer.kl_coef > 0 and trainer.lora_rank is None:
        items.append(MemoryItem("trainer rank", "reference model", 4 * share))
    kept = shape.kept
    if trainer.gradient_checkpointing:  # keeps the hidden states between layers, and one recomputed layer
        kept = shape.layers * shape.hidden + kept // shape.layers
    activations = kept * width * trainer.tokens_per_microbatch
    items.append(
        MemoryItem("trainer rank", f"activations of {trainer.tokens_per_microbatch:,} tokens, about", activations)
    )
    logits = 2 * 4 * trainer.logprob_chunk * shape.vocab  # the logits and their gradient, float32
    items.append(MemoryItem("trainer rank", f"logits of {trainer.logprob_chunk} tokens and their gradient", logits))
    if trainer.advantage == "gae":
        items.append(MemoryItem("trainer rank", "critic, its gradients and two moments", 16 * share))
        if width != 4:
            items.append(MemoryItem("trainer rank", "critic in bfloat16 for compute", 2 * shape.parameters))
    if recipe.weights.transport == "shm":
        nbytes = BUFFERS * pushed_bytes(recipe, shape)
        items.append(MemoryItem("shared", "weights for the servers, double-buffered", nbytes))
    return items


def _weights(recipe: Recipe, shape: ModelShape) -> list[str]:
    """Lines that name the transport of a weight push, and what each transport costs."""
    chosen, servers = recipe.weights.transport, len(recipe.inference.urls) or recipe.inference.servers
    prices = costs(pushed_bytes(recipe, shape), servers, Path(recipe.launch.run_dir) / recipe.name / "weights")
    others = [f"             instead of {way}: {text}" for way, text in prices.items() if way != chosen]
    return [f"weights    {chosen}: {prices[chosen]}", *others]


def _supervised_memory(recipe: Recipe, shape: ModelShape, width: int) -> list[MemoryItem]:
    """Memory of a supervised trainer: each rank holds the whole model."""
    who, parameters = "trainer rank", shape.parameters
    items = [MemoryItem(who, "parameters, gradients, two Adam moments in float32", 16 * parameters)]
    if width != 4:
        items.append(MemoryItem(who, "parameters in bfloat16 for compute", 2 * parameters))
    if recipe.trainer.ranks > 1:
        items.append(MemoryItem(who, "buffers of gradients for the other ranks", 4 * parameters))
    if recipe.trainer.type == "dpo":
        items.append(MemoryItem(who, "reference model", 4 * parameters))
    return items


def plan(recipe: Recipe, config: Mapping[str, Any] | None, model: str) -> tuple[Recipe, list[str]]:
    """Returns the recipe as it would run on this machine, and lines of text that describe the run.

    Args:
        recipe: The recipe as loaded, not resolved yet.
        config: Contents of the model's ``config.json``; ``None`` if it is not known.
        model: Sentence that says where the model is, or why its config is not known.
    """
    shape, unknown = None, "the model's config.json is not available"
    if config is not None:
        check_mesh(recipe.trainer, config)
        if recipe.trainer.type is not None and (why := refused_config(config)):
            raise UserError(f"the model cannot be trained: {why}")
        try:
            shape = model_shape(config)
        except ValueError as error:
            unknown = str(error)
    resolved = resolve(recipe, shape)
    chosen = [f"auto       {key}: {value}" for key, value in decided(recipe, resolved).items()]
    said = [f"hint       {one}" for one in hints(resolved)]
    before = [*_before_memory(resolved, model), *_rows(resolved, config)]
    return resolved, [*before, *chosen, *_memory_lines(resolved, shape, unknown), *said]


def _rows(recipe: Recipe, config: Mapping[str, Any] | None) -> list[str]:
    """Says how the trainer computes several sequences, which for most models is found by trying."""
    if not config or recipe.trainer.type is None or recipe.trainer.type in SUPERVISED:
        return []
    if is_plain(config):
        return ["rows       prefix trees: common beginnings are computed once"]
    return [f"rows       prefix trees or slower ones; agentrl model check {recipe.model.name} tries which"]


def _before_memory(recipe: Recipe, model: str) -> list[str]:
    machines = [f"machine    {text}" for text in placement.lines(recipe)]
    return [f"model      {model}", *(f"process    {text}" for text in _processes(recipe)), *machines, *_tokens(recipe)]


def _memory_lines(recipe: Recipe, shape: ModelShape | None, unknown: str) -> list[str]:
    if shape is None:
        return [f"memory     not estimated: {unknown}"]
    lines: list[str] = []
    if recipe.trainer.type is not None and recipe.trainer.type not in SUPERVISED:
        lines += _weights(recipe, shape)
    without = " without activations" if recipe.trainer.type in SUPERVISED else ""
    lines.append(f"memory     for {shape.parameters / 1e6:,.0f}M parameters, an estimate{without}:")
    items = memory(recipe, shape)
    lines += [f"  {item.process + ',':<14} {item.what:<52} {_size(item.nbytes):>9}" for item in items]
    for process in dict.fromkeys(item.process for item in items):
        total = sum(item.nbytes for item in items if item.process == process)
        lines.append(f"  {process + ', sum':<67} {_size(total):>9}")
    if recipe.trainer.type is not None and recipe.trainer.type not in SUPERVISED and recipe.trainer.ranks > 1:
        lines.append("           without whole gradients, freed layers and what ranks share: agentrl plan counts them")
    return lines


def _processes(recipe: Recipe) -> list[str]:
    inference, trainer, device = recipe.inference, recipe.trainer, recipe.launch.device
    where = f"{platform.machine()} CPU" if device == "cpu" else "CUDA GPU"
    found: list[str] = []
    if trainer.type in SUPERVISED:
        return _supervised_processes(recipe, where)
    if inference.urls:
        found.append(f"inference server, running already: {', '.join(inference.urls)}")
    else:
        threads = f", {inference.threads} threads" if inference.threads else ""
        most = f" to {inference.max_servers}" if inference.max_servers else ""
        split = "".join(f", {name} {size}" for name, size in placement.sizes(recipe).items())
        kind = f"{inference.engine}, {where}, {inference.dtype}{split}{threads}"
        found.append(f"{inference.servers}{most} x inference server, {kind}")
    teacher = recipe.teacher
    if teacher.urls and trainer.type is not None:
        found.append(f"teacher server, running already: {', '.join(teacher.urls)}")
    elif teacher.model is not None and trainer.type is not None:
        found.append(
            f"{teacher.servers} x teacher server, {teacher.engine}, {where}, {teacher.dtype}: {teacher.model}, whose "
            "memory is not in the estimate"
        )
    found.append("1 x rollout controller")
    if recipe.rollout.workers and trainer.type is not None:
        found.append(f"{recipe.rollout.workers} x rollout worker")
    if trainer.type is None:
        found.append("no trainer: evaluation only")
    else:
        found.append(f"{_ranks(recipe)}, {trainer.type}, {where}, computes in {trainer.dtype} on float32 parameters")
    return found


def _ranks(recipe: Recipe) -> str:
    """Says how many ranks there are, and on how many machines."""
    trainer = recipe.trainer
    return f"{trainer.nproc} x trainer rank" + f" on each of {trainer.nodes} machines" * (trainer.nodes > 1)


def _supervised_processes(recipe: Recipe, where: str) -> list[str]:
    trainer, inference = recipe.trainer, recipe.inference
    computes = f"computes in {trainer.dtype} on float32 parameters"
    text = f"{_ranks(recipe)}, {trainer.type} (TRL), {where}, {computes}"
    if not evaluates(recipe):
        return [text]
    server = f"{inference.servers} x inference server, {inference.engine}, {where}, {inference.dtype}"
    return [f"{server}, before and after", f"{text}, in between"]


def _supervised_tokens(recipe: Recipe) -> list[str]:
    own, trainer = recipe.supervised, recipe.trainer
    kind = "examples" if trainer.type == "sft" else "pairs"
    held_out = f"held-out {kind}, at most {recipe.eval.tasks or 'all'}, "
    every = f"every {recipe.eval.every} steps, " if recipe.eval.every else ""
    lines = [
        f"step       {own.batch_size} {kind}, none longer than {own.max_length:,} tokens",
        f"update     micro-batches of {trainer.tokens_per_microbatch:,} tokens",
        f"length     {' or '.join(_limits(recipe))}",
        f"evaluation {held_out}{every}before and after",
    ]
    if evaluates(recipe):
        episodes = f"{recipe.eval.tasks or 'all'} tasks x {recipe.eval.samples} episodes"
        lines.append(f"evaluation {episodes} of {recipe.env.id}, before and after")
    return lines


def _limits(recipe: Recipe) -> list[str]:
    trainer = recipe.trainer
    limits = [f"{trainer.total_steps} steps"]
    if trainer.epochs:
        limits.append(f"{trainer.epochs} passes over the data")
    if trainer.time_budget:
        limits.append(f"{trainer.time_budget:g} s")
    return limits


def _staleness(rollout: RolloutConfig) -> str:
    """Says how old what is trained may be."""
    bound = (
        "as small as keeps the trainer fed" if rollout.max_staleness == "auto" else f"at most {rollout.max_staleness}"
    )
    what = {"drop": "staleness of an episode", "mask": "staleness of a token", "keep": "mean staleness"}
    return f"{what[rollout.stale]} {bound}"


def _tokens(recipe: Recipe) -> list[str]:
    rollout, sampling, trainer = recipe.rollout, recipe.sampling, recipe.trainer
    if trainer.type in SUPERVISED:
        return _supervised_tokens(recipe)
    tasks = recipe.eval.tasks or "all"
    evaluation = f"evaluation {tasks} tasks x {recipe.eval.samples} episodes"
    if trainer.type is None:
        return [evaluation]
    episodes = rollout.batch_size * rollout.group_size
    every = f"every {recipe.eval.every} steps, " if recipe.eval.every else ""
    return [
        f"step       {rollout.batch_size} tasks x {rollout.group_size} episodes = {episodes} episodes, at most "
        f"{episodes * sampling.max_new_tokens:,} sampled tokens per turn, "
        f"{episodes * recipe.inference.context_length:,} in all",
        f"update     micro-batches of {trainer.tokens_per_microbatch:,} tokens, {_staleness(rollout)}",
        f"length     {' or '.join(_limits(recipe))}",
        f"{evaluation}, {every}before and after",
    ]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.0f} MB"
