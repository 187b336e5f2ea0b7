"""Messages between the controller and its worker processes, as bytes.

Guarantees: only JSON and safetensors. An episode travels as its record, its columns and its line of
``episodes.jsonl``, all made by the worker, so that the controller reads none of its messages: a twentieth of its time
for an episode of 50 turns (docs/rollout_workers.md). A task that JSON would change is refused with its place.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import orjson

from agentrl.config.errors import UserError
from agentrl.core.columns import COLUMNS, Columns, EpisodeRecord, concatenate, image_arrays, split, take_images
from agentrl.core.ending import episode_cut
from agentrl.core.episode import Episode, Task
from agentrl.core.sent_episode import SentEpisode
from agentrl.rollout.episode_runs import EpisodeOrder
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import as_line

_SAID, _LINES = "said", "lines"  # names of the tensors that hold JSON and the episodes' lines
_MORE = ("started", "sampling")  # fields that travel beside the record; the controller knows the rest


@dataclass(frozen=True)
class Ended:
    """End of an order in a worker.

    Attributes:
        number: Number of the order.
        episode: The episode, or what there was when it was cancelled; ``None`` if there is nothing.
        error: Traceback of an error outside the episode's own boundary, or why there is nothing.
    """

    number: int
    episode: "Packed | None" = None
    error: str = ""


@dataclass(frozen=True)
class Packed:
    """An episode, ready to be sent.

    Attributes:
        columns: Columns of the episode.
        line: Line of the episode in ``episodes.jsonl``.
        more: The other fields that the controller needs, as JSON.
    """

    columns: Columns
    line: bytes
    more: dict[str, Any]


@dataclass(frozen=True)
class Delivered:
    """An ended order as the controller reads it.

    Attributes:
        number: Number of the order.
        parts: Arguments of :meth:`SentEpisode.of`, without what the controller knows; ``None`` without an episode.
        error: Why there is no episode.
    """

    number: int
    parts: dict[str, Any] | None
    error: str

    def episode(self, order: EpisodeOrder) -> Episode:
        """Returns the episode of an order."""
        assert self.parts is not None
        known = {"task": order.task.data, "version": order.version, "attempt": order.attempt}
        return SentEpisode.of(**self.parts, **known)


def packed(episode: Episode) -> Packed:
    """Packs an episode; one that cannot be written as JSON becomes a failed one, as in the journal."""
    episode, line = as_line(episode)
    more = {name: getattr(episode, name) for name in _MORE} | {"cut": episode_cut(episode)}
    return Packed(Columns.of([episode]), line.encode(), more)


def ended_to_bytes(ended: Sequence[Ended], **more: Any) -> bytes:
    """Writes ended orders, and ``more`` as JSON, into one safetensors file."""
    from safetensors.numpy import save

    sent = [one.episode for one in ended if one.episode is not None]
    columns = concatenate([one.columns for one in sent])
    said = {
        "orders": [(one.number, one.episode is not None, one.error) for one in ended],
        "records": [record.model_dump(mode="json") for record in columns.episodes],
        "beside": [one.more | {"bytes": len(one.line)} for one in sent],
        "more": more,
    }
    arrays = {name: np.ascontiguousarray(getattr(columns, name)) for name in COLUMNS} | image_arrays(columns.images)
    arrays[_SAID] = np.frombuffer(orjson.dumps(said), np.uint8)
    arrays[_LINES] = np.frombuffer(b"".join(one.line for one in sent), np.uint8)
    return save(arrays)


def ended_from_bytes(data: bytes) -> tuple[list[Delivered], dict[str, Any]]:
    """Reads what :func:`ended_to_bytes` wrote: the ended orders in their order, and ``more``.

    Raises:
        ValueError: The bytes are nothing that a worker sends.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
        said = orjson.loads(arrays.pop(_SAID).tobytes())
        lines = arrays.pop(_LINES).tobytes()
        records = tuple(EpisodeRecord.model_validate(record) for record in said["records"])
        images = take_images(arrays)
        parts = iter(_parts(Columns(records, **arrays, images=images), lines, said["beside"]))
        found = [Delivered(number, next(parts) if whole else None, error) for number, whole, error in said["orders"]]
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"not what a rollout worker sends: {type(error).__name__}: {error}") from error
    return found, said["more"]


def _parts(columns: Columns, lines: bytes, beside: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    start = 0
    for one, more in zip(split(columns), beside, strict=True):
        end = start + more.pop("bytes")
        found.append({"columns": one, "line": lines[start:end].decode(), **more})
        start = end
    return found


def order_as_json(number: int, order: EpisodeOrder) -> dict[str, Any]:
    """Returns an order as plain data.

    Raises:
        RolloutError: The task's row would not arrive as it is.
    """
    if (problem := row_problem(order.task)) is not None:
        raise RolloutError(problem)
    return {
        "number": number,
        "task": {"id": order.task.id, "data": order.task.data},
        **{name: getattr(order, name) for name in _ORDER},
    }


_ORDER = tuple(field.name for field in fields(EpisodeOrder) if field.name != "task")


def order_from_json(given: dict[str, Any]) -> tuple[int, EpisodeOrder]:
    """Reads what :func:`order_as_json` made: the order's number, and the order."""
    task = Task.model_construct(**given["task"])  # checked when the controller loaded it
    return given["number"], EpisodeOrder(task, **{name: given[name] for name in _ORDER})


def check_rows(tasks: Iterable[Task]) -> None:
    """Refuses tasks that would not arrive as they are.

    Raises:
        UserError: A task's row holds what JSON would change.
    """
    for task in tasks:
        if (problem := row_problem(task)) is not None:
            raise UserError(problem)


def row_problem(task: Task) -> str | None:
    """Says why a task cannot be sent to a worker process; ``None`` if it can."""
    place = changed_by_json(task.data)
    if place is None:
        return None
    return (
        f"task {task.id}: its row holds {place}, which JSON would change on its way to a worker process; use plain "
        "data (text, numbers, lists, dicts with text as keys) in the dataset, or rollout.workers=0"
    )


def changed_by_json(value: Any, place: str = "row") -> str | None:
    """Says which value JSON would change or refuse, and where; ``None`` if all would arrive as they are."""
    if value is None or isinstance(value, str | int | float):
        return None
    if type(value) is list:
        found = (changed_by_json(one, f"{place}[{index}]") for index, one in enumerate(value))
    elif type(value) is dict:
        if (wrong := next((key for key in value if not isinstance(key, str)), None)) is not None:
            return f"the key {wrong!r} at {place}"
        found = (changed_by_json(one, f"{place}[{key!r}]") for key, one in value.items())
    else:
        return f"a {type(value).__name__} at {place}"
    return next((one for one in found if one is not None), None)


def to_json(data: Any) -> bytes:
    """Writes JSON for the other side; NaN and infinity stay what they are, in Python's own notation."""
    return json.dumps(data).encode()
