"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models`` in OpenAI's shape, with SGLang's additions.

Guarantees: with ``return_token_ids`` a choice carries the exact prompt and output ids (the stop token included);
streamed deltas, joined, are the text of the plain answer. The model's text is not parsed: tool calls stay text.
"""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentrl.engine.openai_parse import OpenAICall, parse_chat, parse_completion
from agentrl.engine.request import Request
from agentrl.engine.responses import (
    DONE,
    event,
    event_stream,
    json_body,
    json_response,
    meta_info,
    version_spans,
    weight_version,
)
from agentrl.engine.service import Service, StepFailedError

Choice = dict[str, Any]


async def models(http: HttpRequest) -> Response:
    """Handle ``GET /v1/models``."""
    service: Service = http.app.state.service
    card = {
        "id": service.model_path,
        "object": "model",
        "created": 0,
        "owned_by": "agentrl",
        "root": service.model_path,
        "max_model_len": service.loaded.context_length,
    }
    return json_response({"object": "list", "data": [card]})


async def chat(http: HttpRequest) -> Response:
    """Handle ``POST /v1/chat/completions``."""
    service: Service = http.app.state.service
    call = parse_chat(await json_body(http), service)
    if call.stream:
        return await _stream(service, call, http, "chat.completion.chunk", _chat_delta)
    requests = await service.complete(call.prompts, http)
    return json_response(_envelope(service, call, requests, "chat.completion", _chat_choice))


async def completions(http: HttpRequest) -> Response:
    """Handle ``POST /v1/completions``."""
    service: Service = http.app.state.service
    call = parse_completion(await json_body(http), service)
    if call.stream:
        return await _stream(service, call, http, "text_completion", _completion_delta)
    requests = await service.complete(call.prompts, http)
    return json_response(_envelope(service, call, requests, "text_completion", _completion_choice))


def _envelope(
    service: Service,
    call: OpenAICall,
    requests: list[Request],
    kind: str,
    choice: Callable[[Service, OpenAICall, Request], Choice],
) -> dict[str, Any]:
    """The answer around the choices."""
    answer: dict[str, Any] = {
        "id": requests[0].parent if requests else "",
        "object": kind,
        "created": int(time.time()),
        "model": call.model,
        "choices": [{"index": i, **choice(service, call, request)} for i, request in enumerate(requests)],
        "usage": _usage(call, requests),
    }
    if requests:
        version = weight_version(requests[0], service.engine.version)
        answer["metadata"] = {"weight_version": version, "weight_versions": version_spans(requests[0])}
    return answer


def _usage(call: OpenAICall, requests: list[Request]) -> dict[str, int]:
    """Counts tokens; a prompt counts once, whatever its number of samples."""
    prompt, completion = sum(len(prompt.ids) for prompt in call.prompts), sum(len(r.output) for r in requests)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _finish(request: Request) -> dict[str, Any]:
    """Builds ``finish_reason`` and the stop that matched."""
    if request.finish is None:
        return {"finish_reason": None}
    return {"finish_reason": request.finish.kind, "matched_stop": request.finish.matched}


def _extras(service: Service, call: OpenAICall, request: Request, ids_key: str) -> Choice:
    """Token ids and ``meta_info`` where asked for."""
    extras: Choice = {}
    if call.output_ids:
        extras[ids_key] = list(request.output)
    if call.prompt_ids:
        extras["prompt_token_ids"] = list(request.prompt)
    if call.meta:
        extras["meta_info"] = meta_info(request, service.engine.version, logprobs=True)
    return extras


def _chat_choice(service: Service, call: OpenAICall, request: Request) -> Choice:
    message = {"role": "assistant", "content": service.text(request), "tool_calls": None}
    logprobs = {"content": _chat_logprobs(service, request, 0)} if call.logprobs else None
    extras = _extras(service, call, request, "response_token_ids")
    return {"message": message, "logprobs": logprobs, **_finish(request), **extras}


def _chat_logprobs(service: Service, request: Request, start: int) -> list[dict[str, Any]]:
    """OpenAI's list of token, logprob and bytes."""
    entries = []
    for token, logprob in list(zip(request.output, request.logprobs, strict=False))[start:]:
        text = service.decode([token], skip_special_tokens=False)
        entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return entries


def _completion_choice(service: Service, call: OpenAICall, request: Request) -> Choice:
    logprobs = _completion_logprobs(service, request, 0) if call.logprobs else None
    extras = _extras(service, call, request, "token_ids")
    return {"text": service.text(request), "logprobs": logprobs, **_finish(request), **extras}


def _completion_logprobs(service: Service, request: Request, start: int) -> dict[str, Any]:
    """OpenAI's parallel lists."""
    pairs = list(zip(request.output, request.logprobs, strict=False))[start:]
    return {
        "tokens": [service.decode([token], skip_special_tokens=False) for token, _ in pairs],
        "token_logprobs": [logprob for _, logprob in pairs],
        "top_logprobs": None,
        "text_offset": [],
    }


def _chat_delta(service: Service, call: OpenAICall, request: Request, text: str, start: int) -> Choice:
    delta = {"content": text} | ({"role": "assistant"} if start == 0 else {})
    logprobs = {"content": _chat_logprobs(service, request, start)} if call.logprobs else None
    return {"delta": delta, "logprobs": logprobs, **_finish(request)}


def _completion_delta(service: Service, call: OpenAICall, request: Request, text: str, start: int) -> Choice:
    logprobs = _completion_logprobs(service, request, start) if call.logprobs else None
    return {"text": text, "logprobs": logprobs, **_finish(request)}


Delta = Callable[[Service, OpenAICall, Request, str, int], Choice]


async def _stream(service: Service, call: OpenAICall, http: HttpRequest, kind: str, delta: Delta) -> Response:
    """Start a stream; errors of the call itself are still answered by an HTTP status."""
    updates = service.stream(call.prompts, http)
    first = await anext(updates, None)
    head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": call.model}
    return event_stream(_events(service, call, updates, first, head, delta))


async def _events(
    service: Service,
    call: OpenAICall,
    updates: AsyncGenerator[list[Request], None],
    requests: list[Request] | None,
    head: dict[str, Any],
    delta: Delta,
) -> AsyncIterator[bytes]:
    """Chunks with the new text of each choice."""
    sent: dict[int, tuple[str, int]] = {}
    ended: set[int] = set()
    last = requests or []
    try:
        while requests is not None:
            for index, request in enumerate(requests):
                text_before, start = sent.get(index, ("", 0))
                finished, count, text = request.finish is not None, len(request.output), service.text(request)
                if index in ended or (not finished and text == text_before):
                    continue
                sent[index] = (text, count)
                if finished:
                    ended.add(index)
                choice = delta(service, call, request, text[len(text_before) :], start)
                yield event({**head, "choices": [{"index": index, **choice}]})
            requests = await anext(updates, None)
    except StepFailedError as error:
        yield event({"error": {"message": str(error), "code": 500}})
    finally:
        await updates.aclose()
    if call.usage:
        yield event({**head, "choices": [], "usage": _usage(call, last)})
    yield DONE
