"""What an API's error means; the texts are those that OpenAI, Azure, OpenRouter, Mistral and vLLM answer with."""

import importlib
from datetime import UTC, datetime
from typing import Any

import pytest
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI

from agentrl.inference.api_errors import is_fatal, is_filtered, is_overflow, is_transient, mend_of, pause_of

CLIENT = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none")
REQUEST: Any = CLIENT._client.build_request("POST", "http://127.0.0.1:1/v1/chat/completions")


def refusal(status: int, error: Any = None, headers: dict[str, str] | None = None) -> APIStatusError:
    http = importlib.import_module(type(REQUEST).__module__.partition(".")[0])  # the one that openai uses
    response = http.Response(status, json={"error": error or {}}, headers=headers, request=REQUEST)
    return CLIENT._make_status_error_from_response(response)


QUOTA = {"message": "You exceeded your current quota", "type": "insufficient_quota", "code": "insufficient_quota"}
RATE = {"message": "Rate limit reached for requests", "type": "requests", "code": "rate_limit_exceeded"}


@pytest.mark.parametrize(
    ("error", "fatal", "transient"),
    [
        (refusal(429, RATE), False, True),
        (refusal(429, QUOTA), True, False),
        (refusal(401), True, False),
        (refusal(402), True, False),
        (refusal(403), True, False),
        (refusal(404, {"message": "The model `x` does not exist", "code": "model_not_found"}), True, False),
        (refusal(500), False, True),
        (refusal(529), False, True),
        (refusal(503, None, {"x-should-retry": "false"}), False, False),
        (refusal(400), False, False),
        (APIConnectionError(request=REQUEST), False, True),
    ],
)
def test_what_is_repeated_and_what_ends(error: APIError, fatal: bool, transient: bool) -> None:
    assert (is_fatal(error), is_transient(error)) == (fatal, transient)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:10 GMT"}, 10.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:27:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_the_time_to_come_back_is_read_in_seconds_and_as_a_date(headers: dict[str, str], seconds: float | None) -> None:
    assert pause_of(refusal(429, RATE, headers), datetime(2015, 10, 21, 7, 28, tzinfo=UTC)) == seconds


SENT = {"max_tokens": 9, "temperature": 0.0, "seed": 3}
MAX_TOKENS = {
    "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
    "instead.",
    "param": "max_tokens",
    "code": "unsupported_parameter",
}
TEMPERATURE = {
    "message": "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is "
    "supported.",
    "param": "temperature",
    "code": "unsupported_value",
}
SEED = [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted", "input": 3}]


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (refusal(400, MAX_TOKENS), ("max_tokens", "max_completion_tokens")),
        (refusal(400, TEMPERATURE), ("temperature", None)),
        (refusal(422, {"message": SEED}), ("seed", None)),
        (refusal(400, {"message": "`temperature` is deprecated for this model."}), ("temperature", None)),
        (refusal(400, {"message": "max_tokens is too large: 9", "param": "max_tokens"}), None),
        (refusal(400, {"message": "'tools' is not supported with this model", "param": "tools"}), None),
        (refusal(429, MAX_TOKENS), None),
    ],
)
def test_the_option_that_a_model_refuses_is_found(error: APIError, mend: Any) -> None:
    assert mend_of(error, SENT) == mend


def test_content_and_length_of_a_prompt_are_no_configuration_errors() -> None:
    azure = {"message": "The response was filtered due to the content management policy", "code": "content_filter"}
    router = {"message": "openai/x requires moderation. Your input was flagged for violence", "code": 403}
    long = {"message": "This model's maximum context length is 8192 tokens", "code": "context_length_exceeded"}
    assert is_filtered(refusal(400, azure)) and is_filtered(refusal(403, router)) and not is_fatal(refusal(403, router))
    assert is_overflow(refusal(400, long)) and not is_filtered(refusal(400, long)) and not is_overflow(refusal(400))
