"""Handler of ``POST /generate``, compatible with SGLang 0.5.23.

Guarantees: the output ids are exactly the sampled ids, the stop token included; the text leaves it out. The answer to a
batch or ``n > 1`` is a list, prompt by prompt. Streams carry cumulative fields and end with ``data: [DONE]``.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentrl.engine.image_data import images_of_call
from agentrl.engine.params import BadRequestError, boolean, integer, parse_params, token_ids
from agentrl.engine.request import Request
from agentrl.engine.responses import DONE, event, event_stream, json_body, json_response, meta_info
from agentrl.engine.service import Prompt, Service, StepFailedError

MAX_BATCH = 4096
REFUSED = (
    "top_logprobs_num",
    "token_ids_logprob",
    "return_sampling_mask",
    "return_hidden_states",
    "lora_path",
    "input_embeds",
    "session_params",
)


@dataclass(frozen=True)
class GenerateCall:
    """Validated body of a ``/generate`` call.

    Attributes:
        prompts: Prompts of the call, at least one.
        batch: Whether the answer is a list.
        logprobs: Whether to return logprobs.
        stream: Whether to stream.
        prompt_ids: Whether to return the prompt ids.
    """

    prompts: list[Prompt]
    batch: bool
    logprobs: bool
    stream: bool
    prompt_ids: bool


def parse_generate(body: dict[str, Any], service: Service) -> GenerateCall:
    """Validate a body.

    Raises:
        BadRequestError: If a value is wrong or unsupported.
    """
    for key in REFUSED:
        if body.get(key):
            raise BadRequestError(f"{key} is not supported by the embedded engine")
    inputs, batch = _inputs(body, service)
    count = len(inputs)
    params = [parse_params(raw) for raw in _spread("sampling_params", body.get("sampling_params"), count, batch)]
    starts = _spread("logprob_start_len", body.get("logprob_start_len"), count, batch)
    rids = _spread("rid", body.get("rid"), count, batch)
    images = images_of_call(body, inputs, service.loaded.pixels, batch=batch)
    experts = _experts_from(body, inputs, service)
    logprobs = _flag(body, "return_logprob")
    prompts = [
        Prompt(
            ids=ids,
            params=param,
            rid=_rid(rid),
            logprob_start=-1 if start is None or not logprobs else integer("logprob_start_len", start, -1, 2**31),
            images=of_one,
            experts_from=experts,
        )
        for ids, param, start, rid, of_one in zip(inputs, params, starts, rids, images, strict=True)
    ]
    return GenerateCall(
        prompts=prompts,
        batch=batch or any(param.n > 1 for param in params),
        logprobs=logprobs,
        stream=_flag(body, "stream"),
        prompt_ids=_flag(body, "return_prompt_token_ids"),
    )


def _flag(body: dict[str, Any], key: str) -> bool:
    """Reads a boolean key, false by default; SGLang allows a list, whose values must be equal."""
    value = body.get(key)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    return False if value is None else boolean(key, value)


def _experts_from(body: dict[str, Any], inputs: Sequence[Sequence[int]], service: Service) -> int:
    """Returns the first position whose experts are asked for; -1 if none are."""
    if not _flag(body, "return_routed_experts"):
        return -1
    if not service.engine.runner.names_experts:
        raise BadRequestError("return_routed_experts: start the engine with --enable-return-routed-experts")
    value = body.get("routed_experts_start_len")
    return integer("routed_experts_start_len", 0 if value is None else value, 0, min(map(len, inputs)))


def _rid(value: Any) -> str:
    if value is not None and (not isinstance(value, str) or not value):
        raise BadRequestError(f"rid must be a non-empty string, got {value!r:.80}")
    return value or ""


def _inputs(body: dict[str, Any], service: Service) -> tuple[list[tuple[int, ...]], bool]:
    """Returns the prompts as token ids, and whether they came as a batch."""
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequestError("give exactly one of input_ids and text")
    value = ids if text is None else text
    batch = isinstance(value, list) and (text is not None or bool(value and isinstance(value[0], list)))
    items = value if batch and isinstance(value, list) else [value]
    if not 0 < len(items) <= MAX_BATCH:
        raise BadRequestError(f"a batch has 1 to {MAX_BATCH} prompts, got {len(items)}")
    if text is None:
        return [token_ids("input_ids", item, service.loaded.vocab_size) for item in items], batch
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) != len(items):
        raise BadRequestError("text must be a string or a list of strings")
    return [service.encode(item) for item in texts], batch


def _spread(key: str, value: Any, count: int, batch: bool) -> list[Any]:
    """Gives each prompt a value: a list in a batch has one item per prompt, any other value is repeated."""
    if key == "rid" and batch and isinstance(value, str):
        return [f"{value}_{index}" for index in range(count)]
    if not (batch and isinstance(value, list)):
        return [value] * count
    if len(value) != count:
        raise BadRequestError(f"{key} has {len(value)} entries for {count} prompts")
    return value


async def generate(http: HttpRequest) -> Response:
    """Handle ``POST /generate``."""
    service: Service = http.app.state.service
    call = parse_generate(await json_body(http), service)
    if not call.stream:
        requests = await service.complete(call.prompts, http)
        answers = [_answer(service, call, request) for request in requests]
        return json_response(answers if call.batch else answers[0] if answers else {})
    updates = service.stream(call.prompts, http)
    first = await anext(updates, None)
    return event_stream(_events(service, call, updates, first))


async def _events(
    service: Service, call: GenerateCall, updates: AsyncGenerator[list[Request], None], requests: list[Request] | None
) -> AsyncIterator[bytes]:
    """Yields the cumulative answers of requests with new tokens."""
    sent: dict[str, tuple[int, bool]] = {}
    try:
        while requests is not None:
            for index, request in enumerate(requests):
                state = (len(request.output), request.finish is not None)
                if sent.get(request.rid) != state:
                    sent[request.rid] = state
                    answer = _answer(service, call, request)
                    yield event({"index": index, **answer} if call.batch else answer)
            requests = await anext(updates, None)
    except StepFailedError as error:
        yield event({"error": {"message": str(error), "code": 500}})
    finally:
        await updates.aclose()
    yield DONE


def _answer(service: Service, call: GenerateCall, request: Request) -> dict[str, Any]:
    """Builds SGLang's answer for one request."""
    answer = {
        "text": service.text(request),
        "output_ids": list(request.output),
        "meta_info": meta_info(request, service.engine.version, logprobs=call.logprobs),
    }
    if call.prompt_ids:
        answer["prompt_token_ids"] = list(request.prompt)
    return answer
