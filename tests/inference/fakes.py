"""A server that answers from a script, and a tokenizer-exact look at what it was sent."""

import asyncio
from collections.abc import Callable

from agentrl.core.weight_manifest import BroadcastPlan, WeightManifest
from agentrl.inference.backend import Generation, InferenceError, PauseMode, SamplingParams, ServerUnreachable

Script = Callable[[list[int], SamplingParams], Generation]


class FakeBackend:
    """Answers each request through ``script`` and remembers everything.

    Attributes:
        requests: ``(token_ids, params)`` in order.
        scored: ``(token_ids, start)`` in order.
        calls: Names and arguments of the control calls in order.
        held: Set it to an unset event and ``generate`` waits for it.
        refuse: Control calls that fail, by name.
        wrong: What :meth:`verify` reports.
        dead: Nothing is answered any more.
        shift_after: Control call after which each logprob of given tokens is one nat lower; empty for none.
        held_by_other: What :meth:`paused` answers.
        renewed: Set at each renewal of a pause.
    """

    pause_lease: float | None = None

    def __init__(self, script: Script, url: str = "http://fake") -> None:
        self.url = url
        self.script = script
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.calls: list[tuple[str, object]] = []
        self.scored: list[tuple[list[int], int]] = []
        self.held: asyncio.Event | None = None
        self.refuse: set[str] = set()
        self.wrong: list[str] = []
        self.dead = False
        self.shift_after = ""
        self.held_by_other = False
        self.renewed = asyncio.Event()

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        self.requests.append((token_ids, params))
        if self.held is not None:
            await self.held.wait()
        if self.dead:
            raise ServerUnreachable(f"{self.url} is dead")
        return self.script(token_ids, params)

    async def score(self, token_ids: list[int], start: int) -> list[float]:
        """-0.5 times each id."""
        self.scored.append((token_ids, start))
        if self.dead:
            raise ServerUnreachable(f"{self.url} is dead")
        shift = self.shift_after and any(name == self.shift_after for name, _ in self.calls)
        return [-0.5 * token - bool(shift) for token in token_ids[start:]]

    async def alive(self) -> bool:
        return not self.dead

    async def version(self) -> int:
        if self.dead:
            raise ServerUnreachable(f"{self.url} is dead")
        return 0

    async def pause(self, mode: PauseMode) -> None:
        self._control("pause", mode)

    async def resume(self) -> None:
        self._control("resume", None)

    async def renew(self) -> None:
        self.renewed.set()
        self._control("renew", None)

    async def paused(self) -> bool | None:
        return self.held_by_other

    async def load(self, path: str, version: int) -> None:
        self._control("load", (path, version))

    async def receive(self, manifest: WeightManifest, plan: BroadcastPlan) -> None:
        self._control("receive", manifest.version)

    async def ranks(self) -> int:
        return 1

    async def verify(self, manifest: WeightManifest) -> list[str]:
        self._control("verify", manifest.version)
        return self.wrong

    async def close(self) -> None:
        self._control("close", None)

    def _control(self, name: str, argument: object) -> None:
        if self.dead:
            raise ServerUnreachable(f"{self.url} is dead")
        self.calls.append((name, argument))
        if name in self.refuse:
            raise InferenceError(f"{self.url} refuses {name}")


def answer(ids: list[int], *, version: int = 0, finish: str = "stop") -> Generation:
    """A generation with logprobs -1, -2, ..."""
    logprobs = [-float(i + 1) for i in range(len(ids))]
    return Generation(ids, logprobs, [version] * len(ids), finish)  # type: ignore[arg-type]
