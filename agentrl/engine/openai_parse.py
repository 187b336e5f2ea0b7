"""Validates the bodies of calls to OpenAI's endpoints.

Guarantees: features that this engine lacks (other candidates' logprobs, forced tool choice, guided output) are refused
by name; ``input_ids`` is used unchanged, so a multi-turn client stays token-exact. A chat's answer also stops where the
model's chat template ends a turn.
"""

from dataclasses import dataclass, replace
from typing import Any

from agentrl.core.message_shape import MessageError, in_shape
from agentrl.engine.chat_template import TEMPLATE_FAILURES, form_of_calls, with_turn_ends
from agentrl.engine.params import BadRequestError, SamplingParams, boolean, parse_params, token_ids
from agentrl.engine.service import Prompt, Service

COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "regex",
    "ebnf",
    "json_schema",
)
RENAMED = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True)
class OpenAICall:
    """Validated body of a call.

    Attributes:
        prompts: Prompts of the call, at least one.
        model: Model name that the answer repeats.
        logprobs: Whether to return logprobs.
        stream: Whether to stream.
        usage: Whether a stream ends with a usage chunk.
        output_ids: Whether to return token ids of the output and the prompt.
        prompt_ids: Whether to return the token ids of the prompt.
        meta: Whether to return ``meta_info``.
    """

    prompts: list[Prompt]
    model: str
    logprobs: bool
    stream: bool
    usage: bool
    output_ids: bool
    prompt_ids: bool
    meta: bool


def parse_chat(body: dict[str, Any], service: Service) -> OpenAICall:
    """Validate the body of ``/v1/chat/completions``.

    Raises:
        BadRequestError: If anything in it is wrong.
    """
    if body.get("top_logprobs"):
        raise BadRequestError("top_logprobs is not supported by the embedded engine")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequestError("tool_choice must be auto or none: the embedded engine cannot force a call")
    messages = _messages(body.get("messages"))
    given = body.get("input_ids")
    vocab = service.loaded.vocab_size
    ids = _render(body, messages, service) if given is None else token_ids("input_ids", given, vocab)
    limit = body.get("max_completion_tokens")
    params = _params(body, body.get("max_tokens") if limit is None else limit, service.loaded.context_length)
    logprobs = boolean("logprobs", False if body.get("logprobs") is None else body["logprobs"])
    return _call(body, [ids], with_turn_ends(params, service.loaded), service, logprobs)


def parse_completion(body: dict[str, Any], service: Service) -> OpenAICall:
    """Validate the body of ``/v1/completions``.

    Raises:
        BadRequestError: If anything in it is wrong.
    """
    for key in ("echo", "suffix"):
        if body.get(key):
            raise BadRequestError(f"{key} is not supported by the embedded engine")
    if body.get("best_of") not in (None, 1, body.get("n")):
        raise BadRequestError("best_of is not supported by the embedded engine")
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, True, 0, 1):
        raise BadRequestError(f"logprobs must be 0 or 1 (the sampled token's), got {logprobs!r:.80}")
    params = _params(body, body.get("max_tokens"), COMPLETION_TOKENS)
    prompts = _completion_prompts(body.get("prompt"), service)
    return _call(body, prompts, params, service, logprobs is not None and logprobs is not False)


def _call(
    body: dict[str, Any], prompts: list[tuple[int, ...]], params: SamplingParams, service: Service, logprobs: bool
) -> OpenAICall:
    rid, stream = body.get("rid"), _flag(body, "stream")
    if rid is not None and (not isinstance(rid, str) or not rid or len(prompts) > 1):
        raise BadRequestError("rid must be a non-empty string, for a single prompt")
    output_ids = _flag(body, "return_token_ids")
    if stream and output_ids:
        raise BadRequestError("return_token_ids cannot be combined with stream")
    options = body.get("stream_options")
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object")
    model = body.get("model")
    return OpenAICall(
        prompts=[Prompt(ids=ids, params=params, rid=rid or "") for ids in prompts],
        model=model if isinstance(model, str) and model else service.model_path,
        logprobs=logprobs,
        stream=stream,
        usage=_flag(options, "include_usage"),
        output_ids=output_ids,
        prompt_ids=output_ids or _flag(body, "return_prompt_token_ids"),
        meta=_flag(body, "return_meta_info"),
    )


def _flag(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    return False if value is None else boolean(key, value)


def _params(body: dict[str, Any], max_tokens: Any, default: int) -> SamplingParams:
    """Sampling parameters from OpenAI's names."""
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise BadRequestError("response_format is not supported by the embedded engine")
    raw = {key: body[key] for key in COPIED if body.get(key) is not None}
    raw |= {ours: body[theirs] for theirs, ours in RENAMED.items() if body.get(theirs) is not None}
    if max_tokens is not None:
        return parse_params({**raw, "max_new_tokens": max_tokens})
    least = parse_params({**raw, "max_new_tokens": 2**31 - 1})
    return replace(least, max_new_tokens=max(default, least.min_new_tokens))


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages in the one shape, with texts as contents."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise BadRequestError("messages must be a non-empty list of objects")
    for message in value:
        if not isinstance(message.get("role"), str):
            raise BadRequestError("every message needs a role")
    try:
        return [in_shape(message) for message in value]
    except (MessageError, TypeError) as error:
        raise BadRequestError(str(error)) from error


def _render(body: dict[str, Any], messages: list[dict[str, Any]], service: Service) -> tuple[int, ...]:
    """Renders messages with the model's chat template; returns token ids."""
    tokenizer = service.loaded.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise BadRequestError(f"{service.model_path} has no chat template: use /v1/completions, or send input_ids")
    extra, tools = body.get("chat_template_kwargs"), body.get("tools")
    extra = {} if extra is None else extra
    if not isinstance(extra, dict) or not (tools is None or isinstance(tools, list)):
        raise BadRequestError("chat_template_kwargs must be an object and tools a list")
    last = _flag(body, "continue_final_message")
    options = {"add_generation_prompt": not last, "continue_final_message": last} | extra
    try:
        called = any("tool_calls" in message for message in messages)
        given = form_of_calls(tokenizer, extra).given(messages) if called else messages
        text = tokenizer.apply_chat_template(given, tools=tools or None, **(options | {"tokenize": False}))
    except TEMPLATE_FAILURES as error:
        raise BadRequestError(f"the chat template refused the messages: {error}") from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _completion_prompts(value: Any, service: Service) -> list[tuple[int, ...]]:
    """A string, ids, or a list of either."""
    if isinstance(value, str):
        return [service.encode(value)]
    if not isinstance(value, list) or not value:
        raise BadRequestError("prompt must be a string, a list of token ids, or a non-empty list of those")
    if isinstance(value[0], str) and all(isinstance(item, str) for item in value):
        return [service.encode(item) for item in value]
    if isinstance(value[0], list):
        return [token_ids("prompt", item, service.loaded.vocab_size) for item in value]
    return [token_ids("prompt", value, service.loaded.vocab_size)]
