"""Sampling parameters of a request, validated.

Guarantees: a :class:`SamplingParams` that exists is valid: every number is finite and in range, so the loop thread
need not check it again. An unknown key is an error that lists the known ones; a feature that this engine lacks is
refused unless its value is the neutral one (``repetition_penalty=1.0``), never ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_INT = 2**31 - 1
MAX_STOPS = 64  # stop strings are searched after every token: a bound keeps one request from slowing all others
DEFAULT_MAX_NEW_TOKENS = 128
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "stop_regex": (None, "", []),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None, {}),
    "no_stop_trim": (None, False),
    "spaces_between_special_tokens": (None, True, False),
}


class BadRequestError(ValueError):
    """The caller's input is wrong; the message says what and what is allowed. Becomes HTTP 400."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    Attributes:
        max_new_tokens: Most tokens to sample, 0 or more.
        min_new_tokens: Stop tokens cannot be sampled before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Nucleus mass in (0, 1].
        top_k: Most likely tokens kept; -1 keeps all, 1 is greedy.
        min_p: Tokens below ``min_p`` times the largest probability are left out.
        n: Samples of the prompt.
        stop: Strings that end the text (and are not part of it).
        stop_token_ids: Ids that end the output besides the model's own end tokens.
        ignore_eos: Go on after the model's own end tokens.
        skip_special_tokens: Leave special tokens out of the text.
        sampling_seed: Seed of this request's own random stream; None draws one from the engine's.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; its logprob is then reported at temperature 1."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def truncated(self) -> bool:
        """Whether top_p, top_k or min_p leave tokens out, which needs the sorted sampler."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 1 or self.min_p > 0)


def parse_params(raw: Mapping[str, Any] | None) -> SamplingParams:
    """Validate the ``sampling_params`` object of a request.

    Args:
        raw: The JSON object as received; None means all defaults. A key with value None means its default.

    Returns:
        The valid parameters.

    Raises:
        BadRequestError: On an unknown key, a wrong type or a value out of range.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise BadRequestError(f"sampling_params must be an object, got {type(raw).__name__}")
    known = {field.name for field in fields(SamplingParams)}
    unknown = sorted(str(key) for key in raw if key not in known and key not in NEUTRAL)
    if unknown:
        allowed = ", ".join(sorted(known | NEUTRAL.keys()))
        raise BadRequestError(f"unknown sampling_params key {', '.join(map(repr, unknown))}; allowed: {allowed}")
    for key, neutral in NEUTRAL.items():
        if key in raw and raw[key] not in neutral:
            raise BadRequestError(f"sampling_params.{key}={raw[key]!r:.80} is not supported by the embedded engine")
    given = {key: value for key, value in raw.items() if key in known and value is not None}
    params = SamplingParams(**{key: _field(key, value) for key, value in given.items()})
    if params.min_new_tokens > params.max_new_tokens:
        raise BadRequestError(
            f"min_new_tokens ({params.min_new_tokens}) is above max_new_tokens ({params.max_new_tokens})"
        )
    return params


def _field(key: str, value: Any) -> Any:
    """Validates one value of :class:`SamplingParams`."""
    match key:
        case "max_new_tokens" | "min_new_tokens":
            return integer(key, value, 0, MAX_INT)
        case "temperature":
            return number(key, value, 0.0, 1e6)
        case "top_p":
            return number(key, value, 0.0, 1.0, open_low=True)
        case "min_p":
            return number(key, value, 0.0, 1.0)
        case "top_k":
            top_k = integer(key, value, -1, MAX_INT)
            if top_k == 0:
                raise BadRequestError("top_k must be -1 (all) or at least 1, got 0")
            return top_k
        case "n":
            return integer(key, value, 1, 4096)
        case "stop":
            return _stops(value)
        case "stop_token_ids":
            return token_ids(key, value, MAX_INT)
        case "sampling_seed":
            return integer(key, value, -(2**63), 2**63 - 1)
        case _:
            return boolean(key, value)


def _stops(value: Any) -> tuple[str, ...]:
    """Stop strings from one string or a list of strings."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequestError("stop must be a non-empty string or a list of non-empty strings")
    if len(stops) > MAX_STOPS:
        raise BadRequestError(f"stop has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    return tuple(stops)


def integer(key: str, value: Any, low: int, high: int) -> int:
    """An integer in [low, high], or BadRequestError naming ``key``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequestError(f"{key} must be an integer in [{low}, {high}], got {value!r:.80}")
    return value


def number(key: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """A finite number in [low, high] ((low, high] if ``open_low``), or BadRequestError naming ``key``."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or math.isnan(value) or (open_low and value == low):
        raise BadRequestError(f"{key} must be a number in {'(' if open_low else '['}{low}, {high}], got {value!r:.80}")
    return float(value)


def boolean(key: str, value: Any) -> bool:
    """A JSON boolean, or BadRequestError naming ``key``."""
    if not isinstance(value, bool):
        raise BadRequestError(f"{key} must be true or false, got {value!r:.80}")
    return value


def token_ids(key: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Token ids in [0, vocab_size), or BadRequestError naming ``key``."""
    if not isinstance(value, list):
        raise BadRequestError(f"{key} must be a list of token ids, got {type(value).__name__}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise BadRequestError(f"{key} holds {token!r:.80}, which is no token id in [0, {vocab_size})")
    return tuple(value)
