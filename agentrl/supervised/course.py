"""Schedule of a supervised training: learning rate, end, checkpoints, evaluations.

Guarantees: rank 0 reads the clock and all ranks use its time, so all of them stop, save and evaluate in the
same step and have the same learning rate; ``trainer.time_budget``, ``schedule``, ``save_every`` and the rest mean the
same as in a run that learns from episodes.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from agentrl.config.recipe import Recipe
from agentrl.train.schedule import learning_rate_factor, progress


class Course(TrainerCallback):
    """Decides after each step whether to stop, save or evaluate.

    Args:
        recipe: Recipe; ``trainer`` and ``eval`` are read.
        total_steps: Number of optimizer steps of the whole training.
        steps_per_epoch: Number of optimizer steps per epoch.
        elapsed: Seconds of training before this process, in a run that is resumed.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        recipe: Recipe,
        total_steps: int,
        steps_per_epoch: int,
        elapsed: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = recipe.trainer
        self._evaluate_every = recipe.eval.every
        self.total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._before = elapsed
        self._clock = clock
        self._started = self._last_save = clock()
        self.elapsed = elapsed
        self.step_seconds = 0.0
        self.spent_budget: float | None = None  # the time budget, once no further step fits it

    def factor(self, step: int) -> float:
        """Factor on ``trainer.learning_rate`` for the update number ``step``, from 0."""
        config = self._config
        return learning_rate_factor(
            step,
            progress(step, self.total_steps, self.elapsed, config.time_budget),
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
            floor=config.min_learning_rate_ratio,
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Start the clock."""
        self._started = self._last_save = self._clock()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Read the clock, before the next learning rate is set."""
        now = shared(self._before + self._clock() - self._started, args.device)
        self.step_seconds, self.elapsed = now - self.elapsed, now

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Tell TRL's loop whether to stop, save or evaluate now."""
        config, step = self._config, state.global_step
        budget = config.time_budget
        if budget is not None and self.elapsed + self.step_seconds >= budget:
            self.spent_budget = budget
        final = step >= self.total_steps or self.spent_budget is not None
        control.should_training_stop = final
        control.should_save = final or self._save_due(step)
        control.should_evaluate = self._evaluate_every > 0 and step % self._evaluate_every == 0 and not final

    def _save_due(self, step: int) -> bool:
        config = self._config
        since = self._before + self._last_save - self._started
        by_step = config.save_every > 0 and step % config.save_every == 0
        by_time = config.save_seconds is not None and self.elapsed - since >= config.save_seconds
        by_epoch = config.save_epochs is not None and step % (self._steps_per_epoch * config.save_epochs) == 0
        return by_step or by_time or by_epoch

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Restart the time to the next checkpoint."""
        self._last_save = self._started + self.elapsed - self._before


def shared(seconds: float, device: torch.device) -> float:
    """Returns rank 0's ``seconds`` on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.broadcast(value, src=0)
    return float(value.item())
