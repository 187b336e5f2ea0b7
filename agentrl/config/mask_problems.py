"""Finds contradictions among the keys that mask tokens, reject sequences or select tokens of a batch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.core.registry import registered

if TYPE_CHECKING:
    from agentrl.config.algorithm import AlgorithmConfig

# key -> the key without which it does nothing
_BELONGS_TO = {
    "reject_low": "reject_by",
    "reject_high": "reject_by",
    "clip_cov_low": "clip_cov",
    "clip_cov_high": "clip_cov",
    "kl_cov_coef": "kl_cov",
}
# measure of a sequence -> its value if the policies are equal
_EQUAL = {"geometric": 1.0, "k1": 0.0, "k2": 0.0, "k3": 0.0}


def mask_problems(config: "AlgorithmConfig", given: set[str]) -> Iterator[str]:
    """Yields one message for each contradiction.

    Args:
        config: The recipe's trainer section.
        given: Keys that the recipe or the preset sets.
    """
    for key, owner in _BELONGS_TO.items():
        unlike = getattr(config, key) != type(config).model_fields[key].default
        if key in given and unlike and getattr(config, owner) is None:
            yield f"trainer.{key}={getattr(config, key):g} does nothing without trainer.{owner}"
    yield from _rejections(config)
    yield from _divergences(config, given)
    if config.clip_cov is not None and config.clip_cov_low >= config.clip_cov_high:
        yield (
            f"trainer.clip_cov_low={config.clip_cov_low:g} must be below "
            f"trainer.clip_cov_high={config.clip_cov_high:g}: no covariance is between them"
        )
    if config.clip_cov is not None and config.kl_cov is not None:
        yield (
            f"trainer.clip_cov={config.clip_cov:g} and trainer.kl_cov={config.kl_cov:g} are two ways to treat the same "
            "tokens: set one of them"
        )


def _rejections(config: "AlgorithmConfig") -> Iterator[str]:
    measure, low, high = config.reject_by, config.reject_low, config.reject_high
    if measure is None:
        return
    equal = _EQUAL[measure]
    if low is None and high is None:
        yield f"trainer.reject_by={measure} rejects nothing without trainer.reject_low or trainer.reject_high"
    if measure in ("k2", "k3") and low is not None:
        yield (
            f"trainer.reject_low={low:g} would reject the sequences with the smallest mismatch, because "
            f"trainer.reject_by={measure} is never negative: set only trainer.reject_high"
        )
    elif low is not None and (low > equal or (measure == "geometric" and low <= 0)):
        wanted = "above 0 and at most 1" if measure == "geometric" else "at most 0"
        yield f"trainer.reject_low={low:g} must be {wanted} with trainer.reject_by={measure}, {_why(equal)}"
    if high is not None and high < equal:
        yield f"trainer.reject_high={high:g} must be at least {equal:g} with trainer.reject_by={measure}, {_why(equal)}"


def _why(equal: float) -> str:
    return f"which is {equal:g} for equal policies"


def _divergences(config: "AlgorithmConfig", given: set[str]) -> Iterator[str]:
    if config.objective == "dppo":
        if config.ratio == "sequence":
            yield "trainer.objective=dppo masks each token by its own probability: trainer.ratio must be token"
        return
    for key in ("dppo_divergence", "dppo_threshold"):
        value = getattr(config, key)
        unlike = value != type(config).model_fields[key].default
        if key in given and unlike and config.objective in registered("objective"):
            yield f"trainer.{key}={value} does nothing with trainer.objective={config.objective}; it belongs to dppo"
