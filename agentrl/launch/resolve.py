"""Resolves every ``auto`` of a recipe once, when a run starts, before its ``config.json`` is written.

Guarantees: the result depends only on the recipe, the model's sizes and this machine (its CPU, GPU and free shared
memory); there are no side effects. In the sections that the run reads, no ``auto`` remains except in
``trainer.attention``, which depends on the model's class and is resolved when the model is loaded
(:func:`agentrl.train.row_attention.choose_attention`). All processes read the resolved values from the run's
``config.json``. A resumed run is resolved again. A server's number of threads is its own choice unless the recipe sets
it.
"""

from typing import Any

from agentrl.config.device import detect_device
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED
from agentrl.host.compute_dtype import resolved_dtype
from agentrl.host.cores import usable_cores
from agentrl.inference.backend import Transport
from agentrl.inference.kinds.kind import server_kind
from agentrl.launch.model_shape import ModelShape
from agentrl.launch.placement import placed
from agentrl.weights.transport import choose

BYTES = {"float32": 4, "bfloat16": 2}
KEYS = (
    "launch.device",
    "trainer.dtype",
    "trainer.threads",
    "inference.dtype",
    "teacher.dtype",
    "weights.transport",
)  # the keys that are resolved here and shown; weights.names is another, which only the kind of server decides


def resolve(recipe: Recipe, shape: ModelShape | None) -> Recipe:
    """Returns the recipe with every ``auto`` resolved for this machine.

    Args:
        recipe: The recipe as loaded.
        shape: Sizes of the model; ``None`` if unknown; then shared memory is assumed to be large enough.
    """
    device = recipe.launch.device if recipe.launch.device != "auto" else detect_device()
    trainer, read = recipe.trainer, _sections(recipe)
    cores = usable_cores()  # of this process: a job may have a part of the machine
    threads = trainer.threads or max(1, cores // trainer.nproc)
    changes: dict[str, dict[str, Any]] = {
        "launch": {"device": device},
        "trainer": {"dtype": resolved_dtype(trainer.dtype, device), "threads": threads},
        "inference": {"dtype": resolved_dtype(recipe.inference.dtype, device)},
        "teacher": {"dtype": resolved_dtype(recipe.teacher.dtype, device)},
    }
    changes = {name: values for name, values in changes.items() if name in read}
    recipe = _with(recipe, changes)
    if "weights" not in read:
        return recipe
    asked, kind = recipe.weights.names, server_kind(recipe.inference.engine).capabilities
    names = asked if asked != "auto" else kind.weight_names
    return _with(recipe, {"weights": {"transport": transport_of(recipe, shape), "names": names}})


def _with(recipe: Recipe, changes: dict[str, dict[str, Any]]) -> Recipe:
    changed = {name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()}
    return recipe.model_copy(update=changed)


def transport_of(recipe: Recipe, shape: ModelShape | None) -> Transport:
    """Returns the transport of weight pushes, see :func:`agentrl.weights.transport.choose`."""
    return choose(
        recipe.weights.transport,
        server_kind(recipe.inference.engine).capabilities.transports,
        recipe.inference.urls,
        nbytes=pushed_bytes(recipe, shape) if shape is not None else 0,
        files_only=_pushes_adapter(recipe) or recipe.inference.dp * recipe.inference.pp > 1,
        apart=placed(recipe),
    )


def pushed_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of one weight push of a resolved recipe."""
    if _pushes_adapter(recipe):
        return 4 * (recipe.trainer.lora_rank or 0) * shape.linear_sides
    return BYTES[recipe.inference.dtype] * shape.parameters


def decided(asked: Recipe, resolved: Recipe) -> dict[str, str]:
    """Returns the resolved values of the keys that are ``auto`` or unset in a recipe and that its run reads."""
    found = {key: (_value(asked, key), _value(resolved, key)) for key in KEYS if key.split(".")[0] in _sections(asked)}
    return {key: str(value) for key, (before, value) in found.items() if before in ("auto", None)}


def _sections(recipe: Recipe) -> set[str]:
    """Names of the sections that a run of this recipe reads."""
    sections = {"launch", "inference"}
    if recipe.trainer.type is not None:
        sections.add("trainer")
    if recipe.trainer.type is not None and recipe.trainer.type not in SUPERVISED:
        sections.add("weights")
    return sections | ({"teacher"} if recipe.teacher.model is not None else set())


def _value(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def _pushes_adapter(recipe: Recipe) -> bool:
    return recipe.trainer.lora_rank is not None and recipe.trainer.lora_push == "adapter"
