"""Faults that simulated servers, environments and trainers have, as a list of small decisions.

Guarantees: each await of a simulated part takes the next decision of the list; after the last one all goes well. So a
schedule is plain data: it can be printed, repeated, and made smaller until only what matters is left.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["fine", "slow", "late", "hang", "crash", "duplicate"]
KINDS: tuple[Kind, ...] = ("fine", "slow", "late", "hang", "crash", "duplicate")
Place = Literal["request", "answer", "environment", "pause", "load", "verify", "resume", "next_batch", "publish"]
CONTROL = ("pause", "load", "verify", "resume")


class Crash(RuntimeError):
    """A simulated part crashed."""


@dataclass(frozen=True)
class Durations:
    """Virtual seconds of the faults.

    Attributes:
        slow: Delay of ``slow``: longer than most calls, within every limit.
        late: Delay of ``late``: longer than an episode may take.
        call: Time limit that the connection of a call has; a call to a server that ``hang`` meets fails then.
    """

    slow: float = 20.0
    late: float = 1000.0
    call: float = 600.0


class Faults(Protocol):
    """Decides what happens at an await of a simulated part."""

    durations: Durations

    def decide(self, place: Place) -> Kind:
        """Returns what happens at ``place`` now."""
        ...


class NoFaults:
    """Lets everything go well."""

    durations = Durations()

    def decide(self, place: Place) -> Kind:
        """Returns ``fine``."""
        return "fine"


class Schedule:
    """A list of decisions, taken one by one.

    Args:
        decisions: What happens at the first await, the second one, and so on.
        durations: Virtual seconds of the faults.

    Attributes:
        met: Faults that happened, with their place and virtual time, for a message.
    """

    def __init__(self, decisions: Iterable[Kind], durations: Durations | None = None) -> None:
        self._left = iter(decisions)
        self.durations = durations or Durations()
        self.met: list[tuple[float, Place, Kind]] = []

    def decide(self, place: Place) -> Kind:
        """Returns the next decision, ``fine`` after the last one."""
        for kind in self._left:
            if kind != "fine":
                self.met.append((asyncio.get_running_loop().time(), place, kind))
            return kind
        return "fine"


async def suffer(faults: Faults, place: Place) -> Kind:
    """Wait as the next decision says; returns its kind, for what the caller has to do itself (``duplicate``).

    Raises:
        Crash: The decision is ``crash``.
    """
    kind = faults.decide(place)
    if kind == "crash":
        raise Crash(f"simulated crash at {place}")
    if kind == "slow":
        await asyncio.sleep(faults.durations.slow)
    elif kind == "late":
        await asyncio.sleep(faults.durations.late)
    elif kind == "hang":
        await asyncio.get_running_loop().create_future()
    return kind
