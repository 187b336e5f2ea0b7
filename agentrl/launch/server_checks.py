"""Checks that a run's kinds of server have the capabilities that its recipe needs.

Guarantees: nothing is started; the error for a combination that cannot work names its keys and the kinds that would
work; everything is read from the kinds' capabilities, and no kind is named here.
"""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED, evaluates
from agentrl.core.redacted import redacted
from agentrl.inference.kinds.kind import Capabilities, kinds_that, server_kind
from agentrl.launch.resolve import transport_of


def check_servers(recipe: Recipe) -> None:
    """Refuse kinds of server that are unknown or lack a capability that the recipe needs.

    Raises:
        UserError: A kind is unknown or lacks a capability; the message names the kinds that have it.
    """
    for problem in _problems(recipe):
        raise UserError(problem)


def _problems(recipe: Recipe) -> Iterator[str]:
    inference, trainer = recipe.inference, recipe.trainer
    engine, can = f"inference.engine={inference.engine}", _capabilities("inference.engine", inference.engine)
    if trainer.type in SUPERVISED:
        if evaluates(recipe) and not (can.starts and can.token_logprobs):
            yield (
                f"{engine}: trainer.type={trainer.type} evaluates the trained model with token ids, on a server that "
                "the run starts; remove inference.engine, or set supervised.evaluate=false"
            )
        return
    if not can.starts and not inference.urls:
        yield f"{engine} needs inference.urls=[URL]: a run does not start such servers"
    if inference.options and can.token_logprobs:
        yield f"inference.options is for external APIs; {engine} takes the options of sampling alone"
    if not can.token_logprobs:
        yield from _secrets(recipe)
    if trainer.type is None:
        return
    if not can.token_logprobs:
        yield (
            f"trainer.type={trainer.type} needs token ids and logprobs, which {engine} does not return"
            f"{_reason(can, 'token_logprobs')}; use inference.engine={_others('token_logprobs')}, or trainer.type=null "
            "to evaluate"
        )
    yield from _push_problems(recipe, engine, can)
    if trainer.replay_routing and not can.experts:
        yield (
            f"trainer.replay_routing needs the experts that the server chose for each token, which {engine} does not "
            f"name{_reason(can, 'experts')}; use inference.engine={_others('experts')}, or trainer.replay_routing=false"
        )
    if trainer.distill_coef > 0:
        yield from _teacher_problems(recipe)


def _secrets(recipe: Recipe) -> Iterator[str]:
    """Yields the settings of an external API that hold a secret: settings are written into the run's folder."""
    inference = recipe.inference
    where = f"and settings are written down; the key goes into ${inference.api_key_env} (inference.api_key_env)"
    if any(urlsplit(url).username is not None for url in inference.urls):
        yield f"inference.urls: a user's name and password in a URL are a secret, {where}"
    for name, value in inference.options.items():
        if redacted({name: value}, {}) != {name: value}:
            yield f"inference.options.{name} holds a secret, {where}"


def _push_problems(recipe: Recipe, engine: str, can: Capabilities) -> Iterator[str]:
    """Yields the problems of the recipe's weight pushes."""
    weights, trainer = recipe.weights, recipe.trainer
    if trainer.lora_rank is not None and trainer.lora_push == "adapter" and not can.adapters:
        yield (
            f"{engine} takes whole weights only{_reason(can, 'adapters')}: trainer.lora_push=adapter is for "
            f"inference.engine={_others('adapters')}, use trainer.lora_push=merged"
        )
    if weights.transport != "auto" and weights.transport not in can.transports:
        yield (
            f"weights.transport={weights.transport} does not work with {engine}{_reason(can, weights.transport)}; use "
            f"weights.transport={_either(can.transports)}"
        )
    try:
        transport_of(recipe, None)
    except ValueError as error:
        yield f"{engine}: {error}"
    if weights.pause_mode not in can.pause_modes:
        yield (
            f"weights.pause_mode={weights.pause_mode} does not work with {engine}{_reason(can, weights.pause_mode)}; "
            f"use weights.pause_mode={_either(can.pause_modes)}"
        )
    if weights.pause_mode != "abort" and not can.token_versions:
        yield (
            f"weights.pause_mode={weights.pause_mode} lets answers continue across a weight push, but {engine} does "
            f"not return the policy version of each token{_reason(can, 'token_versions')}; use weights.pause_mode=abort"
        )


def _teacher_problems(recipe: Recipe) -> Iterator[str]:
    teacher = recipe.teacher
    engine, can = f"teacher.engine={teacher.engine}", _capabilities("teacher.engine", teacher.engine)
    if not can.scoring:
        yield (
            f"{engine} does not score given tokens{_reason(can, 'scoring')}, which trainer.distill_coef="
            f"{recipe.trainer.distill_coef:g} needs; use teacher.engine={_others('scoring')}"
        )
    if not can.starts and not teacher.urls:
        yield f"{engine} needs teacher.urls=[URL]: a run does not start such servers"


def _capabilities(key: str, name: str) -> Capabilities:
    try:
        return server_kind(name).capabilities
    except (LookupError, ImportError, SyntaxError, TypeError) as error:
        raise UserError(f"{key}={name}: {error}") from error


def _reason(can: Capabilities, what: str) -> str:
    return f" ({can.reasons[what]})" if what in can.reasons else ""


def _others(capability: str) -> str:
    return _either(kinds_that(capability))


def _either(names: Sequence[str]) -> str:
    """Joins names as ``a, b or c``."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "none"
