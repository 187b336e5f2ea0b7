"""Protocols of inference servers, and the data that they exchange.

Guarantees: a generation carries the ids that were sampled, their behavior logprobs and the policy version of each, as
the server stated them; text is only decoded from ids. Errors name the URL and what was expected.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.core.agent import InferenceError
from agentrl.core.weight_manifest import BroadcastPlan, WeightManifest

PauseMode = Literal["abort", "retract", "in_place"]
"""What a weight push does to requests in flight: have them sent again, recompute their cache, or keep it."""

Transport = Literal["shm", "disk", "broadcast"]
"""How new weights reach a server: a file in shared memory, a file on disk, or a process group."""


class ServerUnreachable(InferenceError):
    """The server gave no answer.

    Attributes:
        never_sent: The request did not reach the server.
        timed_out: The server accepted the request and did not answer in time.
    """

    def __init__(self, message: str, *, never_sent: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.never_sent = never_sent
        self.timed_out = timed_out


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    Attributes:
        temperature: 0 is greedy.
        top_k: -1 is the whole vocabulary.
        stop: Strings that end the answer.
        stop_token_ids: Ids that end the answer, and belong to it.
        json_schema: Schema that the answer must fit, as text; not every server can.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    json_schema: str | None = None


@dataclass(frozen=True)
class Generation:
    """The sampled continuation of a prompt.

    Attributes:
        token_ids: ``[tokens]``, the end-of-turn token included where it was sampled.
        logprobs: ``[tokens]`` ``log_softmax(logits / T)`` of each sampled token.
        versions: ``[tokens]`` policy version that sampled it.
        finish_reason: ``stop``, ``length`` or ``abort`` (given up by the server, partial tokens are valid).
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]


class Sampler(Protocol):
    """Samples a continuation of token ids; chat sessions use it."""

    @property
    def url(self) -> str:
        """URL for messages."""
        ...

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation."""
        ...


class Backend(Protocol):
    """One server that generates from token ids and takes weights.

    What only some servers can do refuses by default; a run that needs it is refused before it starts, by the kind's
    :class:`~agentrl.inference.kinds.kind.Capabilities`. A kind for evaluation alone needs ``generate``, ``alive`` and
    ``close``.

    Attributes:
        url: Base URL, without a slash at its end.
    """

    url: str

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation."""
        ...

    async def score(self, token_ids: list[int], start: int) -> list[float]:
        """Logprobs at temperature 1 of the tokens from position ``start`` (at least 1) on, each given all before it."""
        raise InferenceError(f"{self.url}: such a server does not score given tokens")

    async def alive(self) -> bool:
        """Whether the server answers, paused or not."""
        ...

    async def version(self) -> int:
        """Policy version of the loaded weights."""
        raise InferenceError(f"{self.url}: such a server tells no policy version")

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; new requests are held."""
        raise InferenceError(f"{self.url}: such a server cannot be paused")

    async def resume(self) -> None:
        """Go on sampling."""
        raise InferenceError(f"{self.url}: such a server cannot be paused")

    async def load(self, path: str, version: int) -> None:
        """Load weights from a folder."""
        raise InferenceError(f"{self.url}: such a server takes no weights")

    async def receive(self, manifest: WeightManifest, plan: BroadcastPlan) -> None:
        """Take weights that the trainer broadcasts meanwhile."""
        raise InferenceError(f"{self.url}: such a server takes no broadcast weights")

    async def ranks(self) -> int:
        """Processes of the server that hold weights, each of which takes part in a broadcast."""
        raise InferenceError(f"{self.url}: such a server takes no broadcast weights")

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Names of the tensors that are not what the manifest says."""
        raise InferenceError(f"{self.url}: such a server takes no weights")

    async def close(self) -> None:
        """Close connections."""
        ...
