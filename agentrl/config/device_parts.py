"""Chooses among a recipe's parts for devices and for evaluation.

Guarantees: training takes the part of its device. What an evaluation measures (:data:`MEASURED`) is the same on every
device: it comes from the recipe, from its ``on_cpu`` part (the one that every machine can run) and from its ``on_eval``
part, which wins; the device's own part gives the rest: engine, batch sizes, dtypes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.config.device import Device

PARTS = ("on_cpu", "on_gpu", "on_eval")
MEASURED = frozenset(
    {"model", "train_dataset", "valid_dataset", "env", "agent", "workflow", "reward", "sampling", "eval", "seed"}
)
_MEASURED_OF_SERVERS = frozenset({"context_length", "history", "tool_parser", "chat_template_kwargs"})


def parts_of(parts: Mapping[str, Mapping[str, Any]], device: Device, *, evaluates: bool) -> Iterator[dict[str, Any]]:
    """Yields the parts to merge over a recipe, in this order.

    Args:
        parts: Contents of the recipe's parts, by name.
        device: Device of the run.
        evaluates: Whether the run only evaluates.
    """
    own = parts.get("on_cpu" if device == "cpu" else "on_gpu", {})
    if not evaluates:
        yield dict(own)
        return
    yield _split(own, measured=False)
    yield _split(parts.get("on_cpu", {}), measured=True)
    yield dict(parts.get("on_eval", {}))


def _split(part: Mapping[str, Any], *, measured: bool) -> dict[str, Any]:
    """Returns the keys of a part that are measured, or all others."""
    found = {key: value for key, value in part.items() if (key in MEASURED) == measured}
    servers = part.get("inference")
    if isinstance(servers, Mapping):
        found["inference"] = {key: value for key, value in servers.items() if (key in _MEASURED_OF_SERVERS) == measured}
    return found
