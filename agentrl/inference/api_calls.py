"""Sends requests to an OpenAI-compatible API, patiently.

Guarantees: refusals because of too many requests (429, 503), failures of the server (5xx), lost connections and
time-outs are repeated, with growing random waits or as long as the API asks, until an episode has waited for
``patience`` seconds; an error that all other requests would meet (key, permission, model, address, quota) is not, and
is kept in ``problem``, as is an API that never answered. An option that the model refuses is sent changed from then on,
and a key of messages that it refuses (``reasoning_content``) is left out. An error inside an answer with status 200
counts as the error that it is. The API's key is in no error's text, nor in an answer that repeats it.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from openai import APIConnectionError, APIError, APITimeoutError, AsyncOpenAI
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from agentrl.core.agent import ContextOverflow
from agentrl.core.valid_text import printable
from agentrl.inference.api_errors import (
    BUSY,
    error_inside,
    hidden,
    hide_in_choices,
    is_fatal,
    is_filtered,
    is_overflow,
    is_transient,
    lost_connection,
    mend_of,
    pause_of,
    refused_key,
    refused_option,
    status_of,
    without_key,
)
from agentrl.inference.backend import InferenceError
from agentrl.inference.concurrency import Concurrency, Gate, Waits
from agentrl.inference.options import is_given

FIRST_WAIT = 0.5  # seconds, most of the first wait; it doubles with each one
LONGEST_WAIT = 60.0  # seconds, where the API does not say
UNANSWERED = 4  # attempts at an API that has not answered anything yet: its address may be wrong
MODELS_SECONDS = 10.0  # for the list of models
MOST_NAMES = 20  # models that are listed
NO_API = "is that an OpenAI-compatible API? Its URL goes up to and including /v1"
FILTERED = {"choices": [{"index": 0, "finish_reason": "content_filter", "message": {"role": "assistant"}}]}
log = logging.getLogger(__name__)


class ApiCalls:
    """Requests of all episodes to one API.

    Args:
        client: Client of the ``openai`` package, which repeats nothing itself.
        most: Largest number of requests at a time.
        patience: Most seconds that an episode waits to repeat requests.
        no_key: Words about a missing key, for where the API asks for one.
        own: Names of the options that each request has, whatever an agent sets.

    Attributes:
        problem: Why no request can succeed any more; empty while they can.
        url: URL that requests are sent to.
    """

    def __init__(
        self, client: AsyncOpenAI, most: int, patience: float, no_key: str = "", own: Collection[str] = ()
    ) -> None:
        self._client = client
        self._own = frozenset(own)
        self._refused = 0  # requests whose own option was refused before any answer
        self._models: Counter[str] = Counter()  # names of other models than the one asked, in the answers
        self._no_key = no_key
        self._valid = False  # whether an answer was that of a chat
        self._unread = 0  # answers that were not
        self._patience = patience
        self._gate = Gate(Concurrency(most))
        self._mends: dict[str, str | None] = {}
        self._left_out: set[str] = set()  # keys of messages
        self._repeated: Counter[str] = Counter()
        self._answered = False
        self._explaining = asyncio.Lock()
        self.problem = ""
        self.url = f"{str(client.base_url).rstrip('/')}/chat/completions"

    @property
    def notes(self) -> list[str]:
        """Notes about the requests, for a person: what was repeated, and which options the model refused."""
        found = []
        if self._repeated:
            of = ", ".join(f"{why}: {count}" for why, count in self._repeated.most_common())
            lowest, most = self._gate.state.lowest, self._gate.state.most
            fewer = f"; down to {lowest} of {most} requests at a time" if lowest < most else ""
            found.append(f"{self._repeated.total()} requests were repeated ({of}){fewer}")
        for name in self._mends:
            other = self._instead(name)
            instead = f"{other} was sent" if other else "the API's own was used"
            key = f"inference.options.{other}=..." if other else f"inference.options.{name}=null"
            found.append(f"the model refuses the option {name}: {instead} ({key} asks so at once)")
        for key in sorted(self._left_out):
            found.append(f"the API refuses {key} in the messages of the history: it was left out there")
        if self._models:
            named = ", ".join(f"{name}: {count}" for name, count in self._models.most_common())
            found.append(f"the API says which model answered ({named})")
        return found

    async def ask(self, arguments: dict[str, Any], waits: Waits) -> Any:
        """Returns the API's answer.

        Args:
            arguments: Arguments of ``chat.completions.create``.
            waits: Takes the time that the episode waits.

        Raises:
            ContextOverflow: The prompt does not fit the model's context.
            InferenceError: The API failed; the message names the URL.
            openai.APITimeoutError: The answer took longer than the call's own ``timeout``.
        """
        own = is_given(arguments.get("timeout"))  # the agent's limit: it may handle that
        if self.problem:
            raise InferenceError(self.problem)
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: is_transient(error) and not (own and _timed_out(error))),
            wait=_wait,
            stop=lambda state: self._is_over(state, waits),
            sleep=lambda seconds: _sleep(seconds, waits),
            before_sleep=self._repeats,
            reraise=True,
        )
        try:
            return self._checked(await retrying(self._mended, arguments, waits, self._gate.ticket()), arguments)
        except APIError as error:
            without_key(error, self._client.api_key)
            if own and _timed_out(error):
                raise
            if is_filtered(error):
                return self._filtered(arguments)
            raise await self._final(error, waits, arguments) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            text = hidden(f"{self.url}: the answer is no JSON: {error}", self._client.api_key)
            self._is_no_api(text)
            raise InferenceError(text) from error

    def _checked(self, answer: Any, arguments: Mapping[str, Any]) -> Any:
        """Returns an answer that holds choices, each with a message.

        Raises:
            InferenceError: It holds none.
        """
        choices = getattr(answer, "choices", None)
        if not choices or not isinstance(choices, list) or any(not hasattr(one, "message") for one in choices):
            text = hidden(f"{self.url}: the answer holds no choices: {answer}", self._client.api_key)[:400]
            self._is_no_api(text)
            raise InferenceError(text)
        self._valid = True
        hide_in_choices(answer, self._client.api_key)
        model = getattr(answer, "model", None)
        if isinstance(model, str) and model and model != arguments.get("model"):
            self._models[printable(model)[:100]] += 1
        return answer

    def _is_no_api(self, text: str) -> None:
        """Keeps the problem if of several answers from this address none was that of a chat."""
        self._unread += 1
        if not self._valid and self._unread >= UNANSWERED:
            self.problem = self.problem or printable(f"{' '.join(text.split())[:500]}; {NO_API}")

    async def _mended(self, arguments: dict[str, Any], waits: Waits, ticket: int) -> Any:
        """Sends a request, again with a changed option or less in its messages as long as the API refuses some."""
        while True:
            sent = self._changed(arguments)
            try:
                return await self._sent(sent, waits, ticket)
            except APIError as error:
                mend = mend_of(error, sent)
                key = refused_key(error, sent["messages"]) if mend is None else None
                if mend is not None:
                    self._mends.setdefault(*mend)
                elif key is not None:
                    self._left_out.add(key)
                else:
                    raise

    async def _sent(self, arguments: dict[str, Any], waits: Waits, ticket: int) -> Any:
        with waits.waiting():
            epoch = await self._gate.enter(ticket)
        try:
            answer = await self._created(arguments)
            failure = error_inside(answer, proven=self._valid)
            if failure is not None:
                raise failure
            self._gate.state.answered()
            self._answered = True
            return answer
        except APIError as error:
            self._answered |= status_of(error) > 0
            if status_of(error) in BUSY and is_transient(error):
                pause = pause_of(error)
                if pause is not None and pause > self._patience:
                    pause = None  # nobody waits that long; others may be let in
                self._gate.state.refused(epoch, self._gate.clock(), pause)
            raise
        finally:
            self._gate.leave()

    async def _created(self, arguments: dict[str, Any]) -> Any:
        try:
            return await self._client.chat.completions.create(**arguments)
        except APITimeoutError as error:
            lost = lost_connection(error)
            if lost is not None:
                raise lost from error
            raise

    def _changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments without what the model refuses."""
        sent = {name: value for name, value in arguments.items() if name not in self._mends}
        for name in self._mends:
            other = self._instead(name)
            if other is not None and name in arguments:
                sent.setdefault(other, arguments[name])
        if self._left_out:
            sent["messages"] = [_without(message, self._left_out) for message in sent["messages"]]
        return sent

    def _instead(self, name: str) -> str | None:
        """Returns the option that takes the place of a refused one; ``None`` if that is refused as well."""
        other = self._mends[name]
        return None if other in self._mends else other

    def _is_over(self, state: RetryCallState, waits: Waits) -> bool:
        error = state.outcome.exception() if state.outcome is not None else None
        unreachable = isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)
        if unreachable and not self._answered:
            return state.attempt_number >= UNANSWERED
        return waits.repeating + state.upcoming_sleep > self._patience

    def _repeats(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, APIError):
            without_key(error, self._client.api_key)
        if not self._repeated:
            limit = "for up to inference.retry_seconds" if self._answered else "a few times"  # see _is_over
            log.warning("%s: %s; it is asked again %s", self.url, str(error).rstrip("."), limit)
        status = status_of(error) if isinstance(error, APIError) else 0
        self._repeated[str(status) if status else type(error).__name__] += 1

    async def _final(self, error: APIError, waits: Waits, arguments: Mapping[str, Any]) -> InferenceError:
        """Returns the error of a request that is given up; one that all others would meet is kept."""
        text = f"{self.url}: {type(error).__name__}: {error}"
        option = refused_option(error, arguments)
        if option is not None:
            text += f" (inference.options.{option} sets it, and null leaves it out)"
        if is_overflow(error):
            return _with_status(ContextOverflow(text), error)
        if is_fatal(error) or (isinstance(error, APIConnectionError) and not self._answered):
            async with self._explaining:  # one asks for more, the others wait: the first problem is the whole one
                if not self.problem:
                    more = await self._more(error)
                    self.problem = printable(" ".join(text.split()))[:600] + printable(more)
        elif option is not None and option.partition(".")[0] in self._own and not self._valid:
            self._refused += 1
            if self._refused >= UNANSWERED:
                self.problem = self.problem or printable(" ".join(text.split()))[:600]
        elif is_transient(error):
            text += (
                f" (given up: {waits.repeating:.0f} s waited, the next wait would pass inference.retry_seconds="
                f"{self._patience:g})"
            )
        return _with_status(InferenceError(text), error)

    async def _more(self, error: APIError) -> str:
        """Returns what a fatal error leaves unsaid: the models that there are, or the missing key."""
        if status_of(error) in (401, 403):
            return self._no_key
        if status_of(error) != 404:
            return ""
        try:
            found = await self._client.models.list(timeout=MODELS_SECONDS)
            names = [str(one.id) for one in found.data]
        except (APIError, AttributeError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
            return f"; {NO_API}"
        more = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"; its models: {', '.join(names[:MOST_NAMES])}{more}" if names else "; it has no models"

    def _filtered(self, arguments: dict[str, Any]) -> Any:
        """Returns the answer to a prompt that the API filtered: none, as where it filters an answer."""
        from openai.types.chat import ChatCompletion

        self._gate.state.answered()
        return ChatCompletion.model_validate(
            {"id": "filtered", "object": "chat.completion", "created": 0, "model": arguments["model"], **FILTERED}
        )


def _without(message: Any, keys: Collection[str]) -> Any:
    return {k: v for k, v in message.items() if k not in keys} if isinstance(message, Mapping) else message


def _timed_out(error: BaseException) -> bool:
    return isinstance(error, APITimeoutError)


def _with_status(raised: InferenceError, error: APIError) -> InferenceError:
    raised.status = status_of(error)
    return raised


def _wait(state: RetryCallState) -> float:
    """Returns the seconds before the next attempt: what the API asks, else a growing random time."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked = pause_of(error) if isinstance(error, APIError) else None
    own = wait_random_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT)(state)
    return own if asked is None else asked + min(own, 1.0)


async def _sleep(seconds: float, waits: Waits) -> None:
    with waits.waiting():
        await asyncio.sleep(seconds)
    waits.repeating += seconds
