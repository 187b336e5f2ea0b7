"""State of one request: its prompt, its sampled tokens, and the reason for its end.

Guarantees: outputs only grow (a retracted request keeps what it sampled); a request finishes exactly once; the random
stream belongs to the request, so its tokens depend on its seed and never on its neighbours; every sampled token lies
in exactly one weight-version span.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from agentrl.core.image_reader import PromptImage
from agentrl.engine.params import SamplingParams

Decode = Callable[[list[int]], str]
Sink = Callable[["Request"], None]
LONGEST_TAIL = 32  # tokens decoded again per token at most: no character and no token sequence needs more


@dataclass(frozen=True)
class Finish:
    """Reason for the end of a request.

    Attributes:
        kind: ``stop``, ``length``, ``abort``, or ``error`` (the model step failed; HTTP 500).
        matched: Token id or string that stopped it.
        message: Reason of an abort or an error.
    """

    kind: str
    matched: int | str | None = None
    message: str = ""

    def as_json(self, length: int) -> dict[str, Any]:
        """SGLang's ``finish_reason`` object; ``length`` is the number of output tokens."""
        match self.kind:
            case "stop":
                return {"type": "stop", "matched": self.matched}
            case "length":
                return {"type": "length", "length": length}
            case _:
                return {"type": "abort", "message": self.message}


@dataclass
class Span:
    """Output tokens [start, end) sampled by one weight version."""

    version: str
    start: int
    end: int


@dataclass(eq=False)
class Request:
    """A prompt being continued.

    Attributes:
        rid: Id, unique among live requests.
        prompt: Prompt token ids.
        params: Sampling parameters.
        limit: Most output tokens, ``max_new_tokens`` capped by the context.
        stop_ids: Ids that end the output.
        on_update: Called by the loop thread when the request ends, and after each token if ``stream``.
        stop_text: Watches for stop strings; None without any.
        parent: Id that the caller gave to all samples of one prompt; aborts match it too.
        stream: Whether each token is reported.
        logprob_start: First prompt position whose logprob is wanted; -1 for none.
        images: Images of the prompt, with the places of their placeholders.
        experts_from: First position whose experts the answer names; -1 for none.
        experts: int16 ``[tokens, width]`` these, once the request has ended; ``None`` if nothing was computed.
        twin: Equal for running requests with the same tokens in the cache, all written by the same steps.
        weights: Engine's counter of the weights that computed the request's cache.
    """

    rid: str
    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    on_update: Sink
    rng: random.Random
    stop_text: "StopText | None" = None
    parent: str = ""
    stream: bool = False
    logprob_start: int = -1
    images: tuple[PromptImage, ...] = ()
    experts_from: int = -1
    experts: Tensor | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    spans: list[Span] = field(default_factory=list)
    finish: Finish | None = None
    retractions: int = 0
    prefix: tuple[int, ...] = ()
    prefix_hash: int = 0
    twin: int = -1
    weights: int = -1
    created: float = field(default_factory=time.monotonic)
    finished: float = 0.0

    @property
    def length(self) -> int:
        """Tokens so far: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def footprint(self) -> int:
        """Most tokens, prompt and output, that the request may reach."""
        return len(self.prompt) + self.limit

    @property
    def cached(self) -> tuple[int, ...]:
        """Tokens whose keys and values are in the slot while the request runs: all but the last one."""
        return (*self.prompt, *self.output)[:-1] if self.output else self.prompt

    @property
    def last(self) -> int:
        """The last token, the input of the next decode step."""
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the next prefill must score the prompt (once, not again after a retraction)."""
        return self.logprob_start >= 0 and self.input_logprobs is None

    @property
    def banned(self) -> frozenset[int]:
        """Ids that may not be sampled now: stop ids before ``min_new_tokens``."""
        return self.stop_ids if len(self.output) < self.params.min_new_tokens else frozenset()

    def enqueue(self) -> None:
        """Set the tokens of the next prefill."""
        self.prefix = self.prompt + tuple(self.output)
        self.prefix_hash = hash(self.prefix)

    def append(self, token: int, logprob: float, version: str) -> None:
        """Take one sampled token and decide whether the request ends with it.

        Args:
            token: Sampled id.
            logprob: log_softmax(logits / temperature) at ``token``.
            version: Weight version that sampled it.
        """
        index = len(self.output)
        self.output.append(token)
        self.logprobs.append(logprob)
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(Span(version, index, index))
        self.spans[-1].end = index + 1
        matched = self.stop_text.push(token) if self.stop_text else None
        if token in self.stop_ids and len(self.output) > self.params.min_new_tokens:
            self.end(Finish("stop", matched=token))
        elif matched is not None and len(self.output) >= self.params.min_new_tokens:
            self.end(Finish("stop", matched=matched))
        elif len(self.output) >= self.limit:
            self.end(Finish("length"))

    def end(self, finish: Finish) -> None:
        """Finish once; a second reason is ignored."""
        if self.finish is None:
            self.finish = finish
            self.finished = time.monotonic()


class StopText:
    """Finds stop strings in the growing text of one request, decoding only its tail.

    Args:
        stops: Strings to look for.
        decode: Token ids to text.
    """

    def __init__(self, stops: tuple[str, ...], decode: Decode) -> None:
        """Start with no text."""
        self.stops = stops
        self._decode = decode
        self._tokens: list[int] = []
        self._read = 0  # tokens whose text is in self.text
        self._start = 0  # where the decoded tail begins: a token's text depends on the one before it
        self.text = ""
        self.cut = -1  # where in the text the last match begins

    def push(self, token: int) -> str | None:
        """Add one token; the stop string that its text completes, the earliest in the text, or None."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._read])
        tail = self._decode(self._tokens[self._start :])
        unfinished = tail.endswith("\ufffd") or len(tail) <= len(known)  # a character waits for its other bytes
        if unfinished and len(self._tokens) - self._start < LONGEST_TAIL:
            return None
        searched = max(0, len(self.text) - max(map(len, self.stops)) + 1)
        self.text += tail[len(known) :]
        self._start, self._read = self._read, len(self._tokens)
        hits = [(self.text.find(stop, searched), stop) for stop in self.stops]
        found = [hit for hit in hits if hit[0] >= 0]
        if not found:
            return None
        self.cut, stop = min(found)
        return stop
