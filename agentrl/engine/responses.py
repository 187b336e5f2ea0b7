"""JSON and event-stream responses, and the parts of answers that all endpoints share.

Guarantees: an error is ``{"error": {"message": ...}}`` everywhere; ``meta_info`` is SGLang's.
"""

import base64
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from agentrl.engine.params import BadRequestError
from agentrl.engine.request import Request

DONE = b"data: [DONE]\n\n"


def json_response(content: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def error_response(message: str, status: int) -> Response:
    """An error in the shape of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)


def event(content: Any) -> bytes:
    """Encodes one server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """A response of server-sent events."""
    return StreamingResponse(events, media_type="text/event-stream")


async def json_body(http: HttpRequest, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object of a request.

    Args:
        http: The request.
        optional: Whether an empty body means an empty object.

    Raises:
        BadRequestError: If the body is no JSON object.
    """
    raw = await http.body()
    if optional and not raw.strip():
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def version_spans(request: Request) -> list[dict[str, Any]]:
    """Weight-version spans over the output tokens."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in request.spans]


def weight_version(request: Request, current: str) -> str:
    """Version of the last token, or the current one if there is none."""
    return request.spans[-1].version if request.spans else current


def meta_info(request: Request, current_version: str, *, logprobs: bool) -> dict[str, Any]:
    """SGLang's ``meta_info`` of a request up to its latest token.

    Args:
        request: Running or finished.
        current_version: Version that the server has now.
        logprobs: Whether to include the logprob lists.
    """
    output = list(request.output)  # the loop thread may append meanwhile
    info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish.as_json(len(output)) if request.finish else None,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(output),
        "cached_tokens": 0,
        "num_retractions": request.retractions,
        "weight_version": weight_version(request, current_version),
    }
    if request.finish:
        info["weight_versions"] = version_spans(request)
        info["e2e_latency"] = request.finished - request.created
    if request.experts is not None:
        numbers = request.experts.numpy().astype("<i4")
        info["routed_experts"] = base64.b64encode(numbers.tobytes()).decode("ascii")
    if logprobs:
        pairs = list(zip(request.logprobs, output, strict=False))
        info["input_token_logprobs"] = _input_logprobs(request)
        info["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        info["output_token_logprobs_length"] = len(pairs)
    return info


def _input_logprobs(request: Request) -> list[list[Any]]:
    """[logprob, id, None] of the scored prompt positions; position 0 has no logprob."""
    if request.logprob_start < 0 or request.input_logprobs is None:
        return []
    scores: list[float | None] = [*([None] if request.logprob_start == 0 else []), *request.input_logprobs]
    ids = request.prompt[request.logprob_start :]
    return [[score, token, None] for score, token in zip(scores, ids, strict=False)]
