"""Format of the rollouts' part of a checkpoint: finished groups that were not trained yet, and plain state.

Guarantees: :func:`unpack` inverts :func:`pack`; the bytes are a safetensors file, nothing is pickled.
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from agentrl.core.columns import (
    COLUMNS,
    SAID,
    Columns,
    EpisodeRecord,
    as_bytes,
    from_array,
    image_arrays,
    take_images,
)
from agentrl.rollout.buffer import Group
from agentrl.rollout.group_account import Tally

_TALLY = TypeAdapter(Tally)


def pack(groups: Sequence[Group], state: dict[str, Any]) -> bytes:
    """Writes groups and plain state as safetensors; a group's columns are named ``<its number>/<column>``."""
    from safetensors.numpy import save

    arrays = {f"{i}/{name}": getattr(one.columns, name) for i, one in enumerate(groups) for name in COLUMNS}
    for one in groups:
        arrays |= image_arrays(one.columns.images)
    return save(arrays | {SAID: as_bytes({"groups": [_record(group) for group in groups], "state": state})})


def unpack(data: bytes) -> tuple[list[Group], dict[str, Any]]:
    """Reads what :func:`pack` wrote."""
    from safetensors.numpy import load

    arrays = load(data)
    said, images = from_array(arrays[SAID]), take_images(arrays)
    groups = [
        Group(
            record["draw"],
            _columns(record["episodes"], {name: arrays[f"{i}/{name}"] for name in COLUMNS}, images),
            _TALLY.validate_python(record["tally"]),
        )
        for i, record in enumerate(said["groups"])
    ]
    return groups, said["state"]


def _columns(episodes: Sequence[dict[str, Any]], arrays: dict[str, Any], images: dict[str, bytes]) -> Columns:
    records = tuple(map(EpisodeRecord.model_validate, episodes))
    own = {name: images[name] for record in records for _, names in record.images for name in names}
    return Columns(records, **arrays, images=own)


def owed_step(data: bytes) -> int | None:
    """Returns the step of the record that waited for its evaluation at a checkpoint; ``None`` if none did."""
    from safetensors.numpy import load

    owed = from_array(load(data)[SAID])["state"]["unwritten"]
    return None if owed is None else owed["step"]


def _record(group: Group) -> dict[str, Any]:
    episodes = [record.model_dump(mode="json") for record in group.columns.episodes]
    return {"draw": group.draw, "episodes": episodes, "tally": json.loads(_TALLY.dump_json(group.tally))}
