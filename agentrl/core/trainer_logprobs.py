"""The trainer's logprobs of single tokens, kept for a few groups of each step in a file of the run's folder.

Guarantees: one line for each episode, which says its step; an episode that a resumed run trains again has a further
line, and the last one counts; what was not measured of a message is NaN. What is stored is the gap to the behavior
logprob as float16, which keeps three digits of small gaps too.
"""

import base64
import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = "trainer-logprobs.jsonl"
Gaps = dict[str, dict[int, NDArray[np.float32]]]
"""Role -> index of a message -> ``[sampled]`` behavior minus trainer logprob, NaN where it was not measured."""


def gaps_line(step: int, group_id: str, index: int, gaps: Mapping[str, Mapping[int, Any]]) -> str:
    """Returns the line of an episode.

    Args:
        step: Step before whose first update the tokens were measured.
        group_id: Id of the episode's group.
        index: Number of the episode in its group.
        gaps: Gaps of its messages, see :data:`Gaps`.
    """
    packed = {
        role: {str(message): base64.b64encode(_half(values).tobytes()).decode() for message, values in own.items()}
        for role, own in gaps.items()
    }
    return json.dumps({**_key(group_id, index), "step": step, "gaps": packed}) + "\n"


def read_gaps(folder: Path, record: Mapping[str, Any]) -> Gaps:
    """Reads what the trainer said of an episode; empty where it said nothing, and for an attempt that was retried.

    Args:
        folder: Folder of the run.
        record: The episode's record.
    """
    if record.get("retried"):
        return {}
    try:
        with (folder / FILE).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            line = _last_line(data, record)
    except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
        return {}
    try:
        return {
            role: {int(at): np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32) for at, text in own.items()}
            for role, own in json.loads(line)["gaps"].items()
        }
    except (ValueError, KeyError, AttributeError, TypeError):  # half written, or of another version
        return {}


def _key(group_id: str, index: int) -> dict[str, Any]:
    return {"group_id": group_id, "index": index}


def _last_line(data: mmap.mmap, record: Mapping[str, Any]) -> bytes:
    own = _key(str(record.get("group_id")), int(record.get("index") or 0))
    begin = json.dumps(own)[:-1].encode() + b", "
    at = data.rfind(begin)
    while at > 0 and data[at - 1] != ord("\n"):  # the same letters inside a line
        at = data.rfind(begin, 0, at)
    end = data.find(b"\n", at) if at >= 0 else -1
    return data[at:end] if end >= 0 else b""


def _half(values: Sequence[float] | NDArray[Any]) -> NDArray[np.float16]:
    limit = float(np.finfo(np.float16).max)
    return np.clip(np.asarray(values, np.float64), -limit, limit).astype("<f2")
