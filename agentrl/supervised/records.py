"""What TRL's trainers log, as records of ``metrics.jsonl`` in our words.

Guarantees: one record per step and one per evaluation of the held-out lines; every name stands in a table here, so a
number that TRL begins to log under a new name does not slip in unnoticed; rank 0 alone writes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from agentrl.evaluate.intervals import proportion_interval
from agentrl.supervised.course import Course

NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "epoch": "epoch",
    "entropy": "entropy",
    "mean_token_accuracy": "token_accuracy",
    "rewards/accuracies": "pair_accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "logps/chosen": "logp_chosen",
    "logps/rejected": "logp_rejected",
    "accuracy": "pair_accuracy",
    "margin": "margin",
    "min_reward": "reward_min",
    "mean_reward": "reward_mean",
    "max_reward": "reward_max",
}
_HELD_OUT = ("loss", "token_accuracy", "pair_accuracy", "margin")


class Records(TrainerCallback):
    """Writes what the trainer logs.

    Args:
        write: Takes a step and its metrics.
        course: Knows how long the step took.
        held_out: Number of held-out lines.
        own_reference: The starting policy is the reference (DPO), which tells no pair apart before the first step.
    """

    def __init__(
        self, write: Callable[[int, dict[str, float]], None], course: Course, held_out: int, own_reference: bool = False
    ) -> None:
        self._write = write
        self._course = course
        self._held_out = held_out
        self._own_reference = own_reference
        self._tokens = 0.0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **more: Any,
    ) -> None:
        """One record of a step or an evaluation; the summary at the end of the training is neither."""
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            record = held_out_record(logs, self._held_out)
            if self._own_reference and state.global_step == 0:
                record = {name: value for name, value in record.items() if "pair_accuracy" not in name}
            self._write(state.global_step, record)
        elif "loss" in logs:
            record = {f"train/{name}": float(logs[key]) for key, name in NAMES.items() if key in logs}
            total = float(logs.get("num_tokens", self._tokens))
            record["train/tokens"], self._tokens = total - self._tokens, total
            self._write(state.global_step, record | {"time/step": self._course.step_seconds})


def held_out_record(logs: Mapping[str, float], lines: int) -> dict[str, float]:
    """An evaluation's record; the share of pairs told apart comes with its interval.

    Args:
        logs: As TRL logs them, ``eval_`` before each name.
        lines: How many lines were held out.
    """
    found = {name: float(logs[f"eval_{key}"]) for key, name in NAMES.items() if f"eval_{key}" in logs}
    record = {f"eval/{name}": value for name, value in found.items() if name in _HELD_OUT}
    record["eval/lines"] = float(lines)
    if "pair_accuracy" in found:
        right = round(found["pair_accuracy"] * lines)
        low, high = proportion_interval(right, lines)
        record |= {"eval/pair_accuracy_low": low, "eval/pair_accuracy_high": high}
    return record
