"""Stops a run whose trainer does not compute the logprobs that its servers say they sampled with.

Guarantees: each process of a trainer, also after a resume, judges the first step whose tokens were all sampled by the
version that the step starts from, before this step's weights are published or saved. Every rank decides the same.
"""

import math
from collections.abc import Mapping

from agentrl.train.measured import Differences, Measured

ENOUGH = 32  # measured tokens below which a step says too little
FAR, SHOWN = 0.1, 3  # absolute log ratio of a token that differs; number of such tokens in the message
CAUSES = (
    "the server applies penalties (repetition, presence, frequency; its generation_config.json may set them), or "
    "another temperature, top_p or top_k than sampling.*; it holds other weights than model.name; it computes in "
    "another dtype; its weights are quantized (then raise trainer.max_first_mismatch, or set it to null)"
)


class TrainingStopped(RuntimeError):
    """Training cannot continue usefully; the message says why."""


class FirstMismatch:
    """Check of the first step on tokens of the current version.

    Args:
        limit: The recipe's ``trainer.max_first_mismatch``.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._due = True

    def check(self, metrics: Mapping[str, float], measured: Measured) -> None:
        """Judges a step, if no earlier one was; a collective.

        Args:
            metrics: The step's metrics, the same on every rank.
            measured: What this rank measured before the step's first update.

        Raises:
            TrainingStopped: The mean absolute log ratio is above the limit.
        """
        tokens, mean = metrics.get("mismatch/tokens", 0.0), metrics.get("mismatch/log_ratio", math.nan)
        alike = metrics.get("mismatch/tokens/age_0") == tokens >= ENOUGH
        if self._limit is None or not self._due or not alike or math.isnan(mean):  # trainer.max_nonfinite is for that
            return
        self._due = False
        if mean > self._limit:
            raise TrainingStopped(self._message(mean, tokens, measured.differences(FAR, SHOWN)))

    def _message(self, mean: float, tokens: float, found: Differences) -> str:
        shown = ", ".join(
            f"token {one.token_id} at position {one.position} of sequence {one.sequence} ({one.behavior:.3g} at the "
            f"server, {one.trainer:.3g} here)"
            for one in found.first
        )
        return (
            "the trainer does not compute the logprobs that the server gave for its own tokens: the mean |log ratio| "
            f"is {mean:.3g} over {tokens:.0f} tokens of the current version, before any update "
            f"(trainer.max_first_mismatch={self._limit:g}); {found.share:.0%} of them differ by more than {FAR:g}, the "
            f"first are {shown}. Likely causes, in this order: {CAUSES}"
        )
