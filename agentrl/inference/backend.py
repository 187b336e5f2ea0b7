"""Protocols of inference servers, and the data that they exchange.

Guarantees: a generation carries the sampled ids, their behavior logprobs and the policy version of each, as the server
reported them; text is only decoded from ids. Errors name the URL and what was expected.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.core.agent import InferenceError
from agentrl.core.experts import ExpertRows
from agentrl.core.image_reader import PromptImage
from agentrl.core.weight_manifest import BroadcastPlan, WeightManifest

PauseMode = Literal["abort", "retract", "in_place"]
"""Effect of a weight push on requests in flight: abort and send them again, recompute their KV cache, or keep it."""

Transport = Literal["shm", "disk", "broadcast"]
"""Transport of new weights to a server: a file in shared memory, a file on disk, or a process group."""


class ServerUnreachable(InferenceError):
    """The server gave no answer.

    Attributes:
        never_sent: Whether the request did not reach the server.
        timed_out: Whether the server accepted the request and did not answer in time.
    """

    def __init__(self, message: str, *, never_sent: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.never_sent = never_sent
        self.timed_out = timed_out


NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Parameters that leave the policy's distribution as it is.

Every request names them: for what is absent a server may take its own values, vLLM those of ``generation_config.json``
(Qwen2.5's has ``repetition_penalty`` 1.05 to 1.1), and then the samples are not the policy's.
"""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        max_new_tokens: Most tokens of the answer.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Probability mass of the most probable tokens that are sampled from; 1 is all of it.
        top_k: Number of the most probable tokens that are sampled from; -1 is the whole vocabulary.
        stop: Strings that end the answer.
        stop_token_ids: Ids that end the answer and are part of it.
        seed: Random seed; ``None`` leaves it to the server.
        json_schema: JSON schema that the answer must fit, as text; not every server supports it.
        images: Images of the prompt in their order, with the places of their placeholders in its ids; only servers of a
            kind that takes images get any.
        experts_from: Position of the prompt from which on the answer shall name the experts that were chosen for each
            token; ``None`` for none.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    json_schema: str | None = None
    images: tuple[PromptImage, ...] = ()
    experts_from: int | None = None


@dataclass(frozen=True)
class Generation:
    """The sampled continuation of a prompt.

    Attributes:
        token_ids: ``[tokens]``, the end-of-turn token included where it was sampled.
        logprobs: ``[tokens]`` ``log_softmax(logits / T)`` of each sampled token.
        versions: ``[tokens]`` policy version that sampled it.
        finish_reason: ``stop``, ``length`` or ``abort`` (the server aborted it; the tokens so far are valid).
        experts: Experts of the tokens from position ``experts_from`` of the prompt on, without the last sampled token,
            which no layer has computed; ``None`` if they were not asked for, or nothing was computed.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    experts: ExpertRows | None = None


class Sampler(Protocol):
    """Samples a continuation of token ids; chat sessions use it."""

    @property
    def url(self) -> str:
        """URL to show in messages."""
        ...

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation."""
        ...


class Backend(Protocol):
    """A server that generates from token ids and loads weights.

    Optional methods raise an error by default; the kind's :class:`~agentrl.inference.kinds.kind.Capabilities` say which
    ones it has, and a run that needs another is refused before it starts. A kind for evaluation only needs
    ``generate``, ``alive`` and ``close``.

    Attributes:
        url: Base URL, without a trailing slash.
        pause_lease: Seconds after which a paused server resumes by itself unless :meth:`renew` is called; ``None`` if
            it stays paused until :meth:`resume`.
    """

    url: str
    pause_lease: float | None = None

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation."""
        ...

    async def score(self, token_ids: list[int], start: int) -> list[float]:
        """Logprobs at temperature 1 of the tokens from position ``start`` (at least 1) on, each given all before it."""
        raise InferenceError(f"{self.url}: this kind of server does not score given tokens")

    async def alive(self) -> bool:
        """Whether the server answers, paused or not."""
        ...

    async def version(self) -> int:
        """Policy version of the loaded weights."""
        raise InferenceError(f"{self.url}: this kind of server does not report a policy version")

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; new requests wait."""
        raise InferenceError(f"{self.url}: this kind of server cannot be paused")

    async def resume(self) -> None:
        """Continue sampling after a pause."""
        raise InferenceError(f"{self.url}: this kind of server cannot be paused")

    async def renew(self) -> None:
        """Extend the lease of this client's pause; nothing to do for servers without leases."""
        return

    async def paused(self) -> bool | None:
        """Whether the server is paused, by whomever; ``None`` if it does not tell."""
        return None

    async def load(self, path: str, version: int) -> None:
        """Load weights from a folder."""
        raise InferenceError(f"{self.url}: this kind of server does not load new weights")

    async def receive(self, manifest: WeightManifest, plan: BroadcastPlan) -> None:
        """Receive weights that the trainer broadcasts at the same time."""
        raise InferenceError(f"{self.url}: this kind of server does not receive broadcast weights")

    async def ranks(self) -> int:
        """Number of the server's processes that hold weights; each takes part in a broadcast."""
        raise InferenceError(f"{self.url}: this kind of server does not receive broadcast weights")

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Names of the tensors that differ from the manifest."""
        raise InferenceError(f"{self.url}: this kind of server does not load new weights")

    async def close(self) -> None:
        """Close connections."""
        ...
