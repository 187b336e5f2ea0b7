"""Rules that end an evaluation before its last task: an interval that is narrow enough, or a budget that is used up.

Guarantees: a rule only keeps further attempts from beginning; those that run are finished, so that every task counts
with all its samples and no answer is preferred because it was quick. The interval of ``eval.until_ci`` is over the
tasks in their order, and wide enough for a rule that looks again and again (:mod:`agentrl.evaluate.fixed_width`). A
budget is passed by no more than what the episodes that run at a time, and the other samples of a task,
cost; an episode whose tokens the API does not tell, as it may not of a filtered prompt, counts as the others do.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.evaluation import EvalConfig
from agentrl.core.ending import SUCCESS
from agentrl.evaluate.fixed_width import is_looked_at, is_narrow, quantile_of, stopping_interval
from agentrl.evaluate.metrics import EvalSummary
from agentrl.evaluate.moments import Estimate
from agentrl.evaluate.prices import Price, table_path
from agentrl.evaluate.tally import Row, TaskScores


class Ends:
    """The rules of one evaluation, and what they looked at.

    Args:
        config: Section ``eval``; ``until_ci``, ``max_cost`` and ``max_total_tokens`` are the rules.
        tasks: Number of tasks.

    Attributes:
        reason: Why no further attempt begins, a sentence; empty while they do.
        tokens: Tokens that were read and sampled so far, as far as the server tells them.
        cost: Cost so far.
    """

    def __init__(self, config: EvalConfig, tasks: int) -> None:
        self.reason = ""
        self.tokens = self.cost = 0.0
        self._config = config
        self._tasks = tasks
        self._running = self._ended = 0
        self._told = 0  # episodes whose tokens are known
        self._before = (0.0, 0.0)  # tokens and cost of an earlier call
        self._quantile = quantile_of(config.until_ci, tasks) if config.until_ci is not None and tasks else 0.0
        self._early: dict[int, float | None] = {}  # by number, of tasks that were finished before an earlier one
        self._next = 0
        self.total, self.n = 0.0, 0  # of the accuracies of all tasks before self._next that have one

    def spent_before(self, usage: Mapping[str, int], price: Price | None) -> None:
        """Adds what episodes of an earlier call cost that are tried again.

        Args:
            usage: Numbers of their tokens.
            price: Price of the model's tokens.
        """
        self._before = (
            float(usage.get("prompt", 0) + usage.get("completion", 0)),
            (price.of(usage) or 0.0) if price is not None else 0.0,
        )
        self.tokens, self.cost = self.tokens + self._before[0], self.cost + self._before[1]

    def begins(self) -> None:
        """Notes that an attempt begins."""
        self._running += 1

    def left(self) -> None:
        """Notes that an attempt that began has ended."""
        self._running -= 1

    def episode(self, row: Row) -> None:
        """Adds what an episode cost."""
        self._ended += 1
        measures = row.measures
        known = "prompt_tokens" in measures and "answer_tokens" in measures
        self._told += known
        self.tokens += measures["prompt_tokens"] + measures["answer_tokens"] if known else 0.0
        self.cost += measures.get("cost", 0.0)
        limits = (
            ("max_total_tokens", self._config.max_total_tokens, self.tokens, self._before[0]),
            ("max_cost", self._config.max_cost, self.cost, self._before[1]),
        )
        for name, most, spent, before in limits:
            if most is None or self.reason:
                continue
            others = self._running + self._ended - self._told
            if not self._told and measures.get("turns"):
                self.reason = f"eval.{name}={most:g}: the server tells no numbers of tokens, so it cannot be kept"
            elif self._told and spent + others * (spent - before) / self._told >= most:
                self.reason = f"eval.{name}={most:g} is used up"

    def task(self, number: int, task: TaskScores) -> None:
        """Adds the accuracy of a finished task; they count in the order of the tasks."""
        if self._config.until_ci is None:
            return
        value = task.scores.get(SUCCESS)
        if task.valid and (value is None or not 0 <= value <= 1):
            self.reason = self.reason or f"eval.until_ci needs an accuracy within 0 and 1, and a task has {value}"
            return
        self._early[number] = value
        while self._next in self._early:
            found = self._early.pop(self._next)
            self._next += 1
            if found is not None:
                self.total, self.n = self.total + found, self.n + 1
                if not self.reason and is_looked_at(self.n):
                    self._look(self._config.until_ci)

    def _look(self, wanted: float) -> None:
        if is_narrow(self.total, self.n, self._quantile, wanted):
            self.reason = f"eval.until_ci={wanted:g} is reached after {self.n} tasks"

    def adjusted(self, summary: EvalSummary) -> EvalSummary:
        """Returns a summary whose accuracy has the interval of the rule, if that decides about the end."""
        if not self.n or SUCCESS not in summary.estimates:
            return summary
        low, high = stopping_interval(self.total, self.n, self._quantile)
        old = summary.estimates[SUCCESS]
        return replace(
            summary,
            estimates={**summary.estimates, SUCCESS: Estimate(old.mean, low, high, old.if_wrong, old.if_right)},
        )

    def as_json(self) -> dict[str, Any]:
        """Returns what was spent, and the number of tasks that decided about the end, where one was to be decided."""
        found: dict[str, Any] = {"tokens": self.tokens} if self.tokens else {}
        if self.cost:
            found["cost"] = self.cost
        return {"spent": found, **({"until_ci_tasks": self.n} if self._config.until_ci is not None else {})}


def check_budget(config: EvalConfig, model: str, *, has_price: bool) -> None:
    """Refuses a budget of cost for a model without a price.

    Raises:
        ConfigError: There is no price.
    """
    if config.max_cost is not None and not has_price:
        raise ConfigError(
            f"eval.max_cost={config.max_cost:g} needs the price of {model}: eval.price={{input: 2.5, output: 10}} "
            f"(for a million tokens), or a line `{model}: {{input: 2.5, output: 10}}` in {table_path()}"
        )
