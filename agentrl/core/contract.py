"""Validates what an environment's ``reset`` and ``step``, and a reward function, return.

Guarantees: a wrong 5-tuple, reward or info raises an error that names the class, the method and its line, the returned
value and the expected one; wrong values are never converted silently. A number is a number in any shape without
dimensions: numpy's scalars and 0-d tensors are taken, and become plain floats. A PIL image or a video in an
observation becomes a data URL, so that observations are plain data. In the names of metrics, half of a surrogate pair,
which UTF-8 cannot hold, becomes U+FFFD.
"""

import functools
import inspect
import math
from numbers import Real
from pathlib import Path
from types import MethodType
from typing import Any

from agentrl.core.shown_parts import as_data
from agentrl.core.valid_text import valid_text

MAX_SHOWN = 200  # characters of a wrong value in an error message


class InvalidNumber(Exception):
    """A returned reward or metric is no finite number."""


class NumberTypeError(InvalidNumber, TypeError):
    """A returned reward or metric is no number."""


class NumberValueError(InvalidNumber, ValueError):
    """A returned reward or metric is not finite."""


def checked_reset(result: Any, env: object) -> tuple[Any, dict[str, Any]]:
    """Returns ``result`` of ``env.reset`` if it is ``(observation, info)``.

    Raises:
        TypeError: ``result`` is no such pair.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{where(env, 'reset')} returned {_what(result)}; want (observation, info)")
    observation, info = result
    if not isinstance(observation, list | tuple):
        raise TypeError(f"{where(env, 'reset')} returned observation={observation!r}; want a list of messages")
    return as_data(observation), checked_info(info, where(env, "reset"))


def checked_step(result: Any, env: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Returns ``result`` of ``env.step`` if it is Gymnasium's 5-tuple; the reward is not checked.

    Raises:
        TypeError: ``result`` is no such tuple.
    """
    place = where(env, "step")
    if not isinstance(result, tuple) or len(result) != 5:
        raise TypeError(f"{place} returned {_what(result)}; want (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = result
    if not isinstance(observation, list | tuple):
        raise TypeError(f"{place} returned observation={observation!r}; want a list of messages, [] at the end")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if type(value).__name__ not in ("bool", "bool_"):  # also accepts numpy's bool
            raise TypeError(f"{place} returned {name}={value!r}, a {type(value).__name__}; want a bool")
    return as_data(observation), reward, bool(terminated), bool(truncated), checked_info(info, place)


def checked_reward(reward: Any, env: object, method: str = "step") -> float:
    """Returns the ``reward`` of ``env.step``, or of another method, as a float.

    Raises:
        TypeError: ``reward`` is not a number.
        ValueError: ``reward`` is not finite.
    """
    return finite(reward, where(env, method))


def checked_unfinished(result: Any, env: object) -> tuple[Any, dict[str, Any]]:
    """Returns ``result`` of ``env.judge_unfinished`` if it is ``(reward, info)``; the reward is not checked.

    Raises:
        TypeError: ``result`` is no such pair.
    """
    place = where(env, "judge_unfinished")
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{place} returned {_what(result)}; want (reward, info)")
    return result[0], checked_info(result[1], place)


def checked_judgement(reward: Any, function: Any) -> float:
    """Returns a reward function's result as a float.

    Raises:
        TypeError: ``reward`` is not a number.
        ValueError: ``reward`` is not finite.
    """
    return finite(reward, source_of(function))


def source_of(function: Any) -> str:
    """Returns ``name (file.py:12)`` for a function, method, partial, or object with ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return _bound_source(function.__func__) if isinstance(function, MethodType) else _source(function)


def _source(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    target = inspect.unwrap(function)
    code = getattr(getattr(target, "__func__", target), "__code__", None)
    if code is None:
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name


_bound_source = functools.lru_cache(maxsize=256)(_source)  # of methods: a workflow's is asked for in every episode


def finite(value: Any, place: str, what: str = "reward") -> float:
    """Returns ``value`` as a float if it is a finite number.

    Args:
        value: The returned value.
        place: Class, method and line that returned it, for the error message.
        what: Description of the expected value, for the error message.

    Raises:
        NumberTypeError: ``value`` is not a number, or is a bool; it is a ``TypeError`` too.
        NumberValueError: ``value`` is not finite; it is a ``ValueError`` too.
    """
    number = _plain_number(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        kind, hint = type(value).__name__, f", float({value!r})" if isinstance(number, bool) else ""
        raise NumberTypeError(
            f"{place} returned {what} {_short(value)}, a {kind}; want a float{hint}, or None where it is missing"
        )
    if not _is_finite(number):
        raise NumberValueError(
            f"{place} returned {what} {_short(value)}; want a finite float, or None where it is missing"
        )
    return float(number)


def checked_info(info: Any, place: str) -> dict[str, Any]:
    """Returns ``info`` if it is a dict whose ``metrics`` are numbers.

    Raises:
        TypeError: ``info`` is no dict, or its ``metrics`` are not finite numbers by name.
    """
    if not isinstance(info, dict):
        raise TypeError(f"{place} returned info={info!r}; want a dict")
    metrics = checked_metrics(info.get("metrics", {}), f"{place} returned info['metrics']")
    return {**info, "metrics": metrics} if metrics else info


def checked_metrics(metrics: Any, place: str) -> dict[str, float]:
    """Returns ``metrics`` as floats if it is a dict of finite numbers.

    Raises:
        TypeError: ``metrics`` is no dict of finite numbers by name.
    """
    plain = {name: _plain_number(value) for name, value in metrics.items()} if isinstance(metrics, dict) else None
    if plain is None or not all(
        isinstance(name, str) and isinstance(value, Real) and _is_finite(value) for name, value in plain.items()
    ):
        raise TypeError(f"{place}={_short(metrics)}; want a dict of finite numbers by name")
    return {valid_text(name): float(value) for name, value in plain.items()}


def where(env: object, method: str) -> str:
    """Returns ``Class.method (file.py:12)`` for a method of the innermost environment."""
    owner = type(getattr(env, "unwrapped", env))
    function = getattr(owner, method, None)
    return _bound_source(function) if inspect.isfunction(function) else f"{owner.__name__}.{method}"


def _plain_number(value: Any) -> Any:
    """Returns the Python number in a numpy scalar or a 0-d tensor; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer or a fraction beyond the largest float
        return False


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _what(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
