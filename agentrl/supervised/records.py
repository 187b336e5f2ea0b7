"""Writes what TRL's trainers log to ``metrics.jsonl``, under this project's metric names.

Guarantees: one record per step and one per evaluation of the held-out examples; every metric name is in a table here,
so a metric that TRL adds later is not recorded by accident; rank 0 alone writes.
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
    "aux_loss": "router_loss",
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
    """Callback that writes the trainer's logs as metric records.

    Args:
        write: Called with a step and its metrics.
        course: Supplies the seconds that the step took.
        held_out: Number of held-out examples.
        own_reference: Whether the starting policy is the reference (DPO): pair accuracy has no meaning before step 1.
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
        """Write one record for a step or an evaluation; TRL's summary at the end of the training is skipped."""
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


def held_out_record(logs: Mapping[str, float], examples: int) -> dict[str, float]:
    """Returns an evaluation's record; pair accuracy comes with its 95% interval.

    Args:
        logs: TRL's metrics, each name prefixed by ``eval_``.
        examples: Number of held-out examples.
    """
    found = {name: float(logs[f"eval_{key}"]) for key, name in NAMES.items() if f"eval_{key}" in logs}
    record = {f"eval/{name}": value for name, value in found.items() if name in _HELD_OUT}
    record["eval/examples"] = float(examples)
    if "pair_accuracy" in found:
        right = round(found["pair_accuracy"] * examples)
        low, high = proportion_interval(right, examples)
        record |= {"eval/pair_accuracy_low": low, "eval/pair_accuracy_high": high}
    return record
