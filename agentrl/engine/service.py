"""Connects HTTP handlers (asyncio) with the loop thread: builds requests, waits for them, decodes their text.

Guarantees: handlers never touch the scheduler or the model; if a client disconnects or a handler is cancelled, its
requests are aborted; waiting uses callbacks, never polling.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from agentrl.core.image_reader import PromptImage
from agentrl.engine.engine import Engine
from agentrl.engine.model import LoadedModel
from agentrl.engine.params import BadRequestError, SamplingParams
from agentrl.engine.request import Request, StopText
from agentrl.weights.update_group import UpdateGroup


class NotReadyError(RuntimeError):
    """The model is not loaded yet. Becomes HTTP 503."""


class StepFailedError(RuntimeError):
    """A model step failed for this request. Becomes HTTP 500."""


@dataclass(frozen=True)
class Prompt:
    """Prompt of a call, with its sampling parameters.

    Attributes:
        ids: Token ids of the prompt.
        params: Sampling parameters; ``params.n`` samples are taken.
        rid: Request id that the caller chose; "" makes a new one.
        logprob_start: First prompt position to score; -1 scores none.
        images: Images of the prompt, with the places of their placeholders.
        experts_from: First position whose experts the answer names; -1 for none.
    """

    ids: tuple[int, ...]
    params: SamplingParams
    rid: str = ""
    logprob_start: int = -1
    images: tuple[PromptImage, ...] = ()
    experts_from: int = -1


class Service:
    """State that the HTTP handlers share.

    Args:
        engine: A started engine.
        model_path: Folder of the model, as given.
    """

    def __init__(self, engine: Engine, model_path: str) -> None:
        """Keep the engine and the path."""
        self.engine = engine
        self.model_path = model_path
        self.update_groups: dict[str, UpdateGroup] = {}  # joined, by name
        self.updating = False  # between begin and end of a weight update

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model.

        Raises:
            NotReadyError: The model is loading, or could not be loaded.
        """
        ready = self.engine.ready
        if not ready.done() or ready.exception() is not None:
            raise NotReadyError("the model is not loaded")
        return ready.result().loaded

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer adds by itself."""
        return tuple(self.loaded.tokenizer.encode(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.loaded.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def text(self, request: Request) -> str:
        """Text of a request's output so far, without its stop and without incomplete characters and stop strings."""
        params, finish, ids = request.params, request.finish, list(request.output)
        if finish and finish.kind == "stop" and isinstance(finish.matched, str) and request.stop_text:
            return request.stop_text.text[: request.stop_text.cut]
        if finish and finish.kind == "stop":
            ids = ids[:-1]
        text = self.decode(ids, skip_special_tokens=params.skip_special_tokens)
        if finish is None:
            text = text.rstrip("\ufffd")
            pending = [size for stop in params.stop for size in range(1, len(stop)) if text.endswith(stop[:size])]
            text = text[: len(text) - max(pending)] if pending else text
        return text

    def requests(self, prompts: Sequence[Prompt], watch: "Watch", *, stream: bool) -> list[Request]:
        """Make the engine requests of a call, ``n`` for each prompt, prompt by prompt.

        Raises:
            BadRequestError: A prompt is empty, or does not fit the context or the token budget.
        """
        return [request for prompt in prompts for request in self._samples(prompt, watch, stream)]

    def _samples(self, prompt: Prompt, watch: "Watch", stream: bool) -> list[Request]:
        """The ``n`` requests of one prompt; the random stream of sample i is seeded with (seed, i)."""
        loaded, params = self.loaded, prompt.params
        if not prompt.ids:
            raise BadRequestError("the prompt is empty")
        if len(prompt.ids) >= loaded.context_length:
            raise BadRequestError(
                f"the prompt has {len(prompt.ids)} tokens, the context length is {loaded.context_length}"
            )
        if prompt.logprob_start > len(prompt.ids):
            raise BadRequestError(
                f"logprob_start_len {prompt.logprob_start} is beyond the prompt of {len(prompt.ids)} tokens"
            )
        limit = min(params.max_new_tokens, loaded.context_length - len(prompt.ids))
        most = self.engine.scheduler.max_tokens
        if most is not None and len(prompt.ids) + limit > most:
            raise BadRequestError(
                f"a prompt of {len(prompt.ids)} tokens with {limit} new ones does not fit --max-tokens {most}"
            )
        rid = prompt.rid or uuid.uuid4().hex
        seed = self.engine.next_seed() if params.sampling_seed is None else params.sampling_seed

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens=params.skip_special_tokens)

        return [
            Request(
                rid=rid if params.n == 1 else f"{rid}-{index}",
                parent=rid,
                prompt=prompt.ids,
                params=params,
                limit=limit,
                stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else loaded.eos_ids),
                on_update=watch.notify,
                rng=random.Random(f"{seed}/{index}"),
                stop_text=StopText(params.stop, decode) if params.stop else None,
                stream=stream,
                logprob_start=prompt.logprob_start,
                images=prompt.images,
                experts_from=prompt.experts_from,
            )
            for index in range(params.n)
        ]

    async def complete(self, prompts: Sequence[Prompt], http: HttpRequest) -> list[Request]:
        """Run a call until all its requests are finished; returns them, or an empty list if the client is gone.

        Raises:
            BadRequestError: A prompt or the parameters are invalid.
            StepFailedError: A model step failed.
        """
        async with aclosing(self._updates(prompts, http, stream=False)) as updates:
            async for requests in updates:
                return requests
        return []

    def stream(self, prompts: Sequence[Prompt], http: HttpRequest) -> AsyncGenerator[list[Request], None]:
        """Run a call, yielding its requests whenever some of them have new tokens; at the last yield all are finished.

        The first ``anext`` raises if the call is invalid. Close the generator: this aborts unfinished requests.
        """
        return self._updates(prompts, http, stream=True)

    async def _updates(
        self, prompts: Sequence[Prompt], http: HttpRequest, *, stream: bool
    ) -> AsyncGenerator[list[Request], None]:
        watch = Watch(asyncio.get_running_loop())
        requests = self.requests(prompts, watch, stream=stream)
        try:
            self.engine.submit(requests)
        except ValueError as error:
            raise BadRequestError(str(error)) from error
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            while len(watch.ended) < len(requests) and not gone.done():
                news = asyncio.ensure_future(watch.changed.wait())
                await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                watch.changed.clear()
                failed = [r.finish.message for r in requests if r.finish and r.finish.kind == "error"]
                if failed:
                    raise StepFailedError(failed[0])
                if not gone.done() and (stream or len(watch.ended) == len(requests)):
                    yield requests
        finally:
            gone.cancel()
            for request in requests:
                if request.finish is None:
                    self.engine.abort(request.rid)


class Watch:
    """Passes the loop thread's updates of some requests to an asyncio loop.

    Args:
        loop: Event loop of the HTTP handler.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start without updates."""
        self._loop = loop
        self.changed = asyncio.Event()
        self.ended: set[str] = set()

    def notify(self, request: Request) -> None:
        """Report an update of a request; called by the loop thread."""
        ended = request.rid if request.finish else ""
        try:
            self._loop.call_soon_threadsafe(self._take, ended)
        except RuntimeError:  # the server's event loop is closed already
            return

    def _take(self, ended: str) -> None:
        if ended:
            self.ended.add(ended)
        self.changed.set()


async def _disconnected(http: HttpRequest) -> None:
    """Return when the client has disconnected."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def settled(future: Any) -> Any:
    """Await a future of the loop thread from asyncio."""
    return await asyncio.wrap_future(future)
