"""Names the kind of a failed episode, so that the first of each kind can be shown and the others counted.

Guarantees: pure. Two failures are of one kind if they have the same stop reason, the same exception type and the same
innermost frame of a user's code; without a frame, if their messages are the same but for numbers.
"""

import re

from agentrl.core.episode import EpisodeBase
from agentrl.core.stack_place import innermost_place
from agentrl.core.valid_text import printable

LONGEST = 3000  # characters of a reason that are kept; its end says most
_MARGIN = re.compile(r"^[ |+]*(-+ ?\d* ?-+)?", re.MULTILINE)  # of a group of exceptions in a traceback
_FRAME = re.compile(r'^File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_TYPE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(: |$)")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


def reason_of(episode: EpisodeBase) -> str:
    """Returns why an episode failed, safe to print and not longer than :data:`LONGEST`."""
    return printable(f"{episode.stop_reason}: {(episode.error or 'no reward').strip()}")[-LONGEST:]


def kind_of(episode: EpisodeBase) -> str:
    """Returns the kind of a failed episode as one line: its stop reason, exception type, and place in a user's code."""
    text = _MARGIN.sub("", episode.error or "").strip() or "no reward"
    frames = [(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(text)]
    last = text.splitlines()[-1]
    named = _TYPE.match(last)
    if not frames:
        return printable(f"{episode.stop_reason}: {_NUMBERS.sub('N', last):.200}")
    what = named["type"] if named is not None else _NUMBERS.sub("N", last.partition(", in ")[0])
    return printable(f"{episode.stop_reason}: {what:.200} in {innermost_place(frames)}")
