"""Names the line of a user's code that a stack is in.

Guarantees: of a stack's frames, the innermost one outside agentrl, Python and installed packages is named, or else the
innermost one. Nothing is run or stopped.
"""

import asyncio
import linecache
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = str(Path(__file__).resolve().parent.parent)
_PYTHON = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib"))


def outer_frames(frame: FrameType | None) -> list[FrameType]:
    """Returns a running frame and its callers, innermost last."""
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def frames_of(task: "asyncio.Task[Any]") -> list[FrameType]:
    """Returns the frames that a suspended task waits in, innermost last; ``Task.get_stack`` returns only the first."""
    found: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, name, None))), None)
        if frame is None:
            break
        found.append(frame)
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        awaited = next((one for name in names if (one := getattr(awaited, name, None)) is not None), None)
    return found


def place(frames: Sequence[FrameType]) -> str:
    """Returns ``function (file.py:12)`` of the innermost frame of a user's code, or else of the innermost frame."""
    if not frames:
        return "an unknown place"
    return innermost_place([(f.f_code.co_filename, f.f_lineno, f.f_code.co_qualname) for f in frames])


def innermost_place(frames: Sequence[tuple[str, int, str]]) -> str:
    """Returns ``function (file.py:12)`` as :func:`place` does.

    Args:
        frames: File, line and function of each frame, innermost last; at least one.
    """
    own = [frame for frame in frames if not frame[0].startswith((_OURS, *_PYTHON, "<frozen"))]
    file, line, name = (own or frames)[-1]
    return f"{name} ({Path(file).name}:{line})"


def written(frames: Sequence[FrameType]) -> str:
    """Returns the frames as the lines of a traceback, innermost last."""
    lines = []
    for frame in frames:
        file, number = frame.f_code.co_filename, frame.f_lineno
        lines.append(f'  File "{file}", line {number}, in {frame.f_code.co_qualname}')
        code = linecache.getline(file, number).strip()
        lines += [f"    {code}"] if code else []
    return "\n".join(lines)
