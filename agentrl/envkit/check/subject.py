"""Calls the environment under check and turns its failures into findings.

Guarantees: the user's code runs only on the checker's loop, with a deadline; a failure is recorded as a finding once,
and stops the current check; the results of ``reset`` and ``step`` have the contract's shape.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.contract import InvalidNumber, checked_metrics, finite
from agentrl.core.environment import Environment
from agentrl.core.task_source import NoTasksError
from agentrl.envkit.check.compare import short
from agentrl.envkit.check.findings import Finding
from agentrl.envkit.check.leaks import OpenWatch, Snapshot
from agentrl.envkit.check.loop import EnvLoop, Outcome
from agentrl.envkit.check.rules import RULES
from agentrl.envkit.check.source_lines import UserLines

Env = Environment[Any, Any]


class StopCheckError(Exception):
    """Raised when a check cannot continue; the text is the rule that was broken."""


class SkipCheckError(Exception):
    """Raised when a check does not apply to this environment; the text is the reason."""


@dataclass
class Seen:
    """Counts and rewards of the episodes played.

    Attributes:
        rewards: Rewards of all steps.
        episodes: Number of episodes started.
        steps: Number of steps taken.
        awaits: Number of calls that were cancelled at an await.
    """

    rewards: list[float] = field(default_factory=list)
    episodes: int = 0
    steps: int = 0
    awaits: int = 0


class Subject:
    """The environment under check.

    Args:
        maker: Makes a new instance.
        loop: Event loop on which the environment's code runs.
        lines: Finds the user's source lines.
        watch: Records which lines open resources.
    """

    def __init__(self, maker: Callable[[], Any], loop: EnvLoop, lines: UserLines, watch: OpenWatch) -> None:
        self.findings: list[Finding] = []
        self.seen = Seen()
        self.loop = loop
        self.lines = lines
        self.watch = watch
        self.made: type | None = None  # the environment's class
        self._maker = maker
        self._crash_rule = "raises"

    def report(self, rule: str, message: str, where: str = "") -> None:
        """Record a finding; the same rule at the same line is recorded once."""
        if not any(found.check == rule and found.where == where for found in self.findings):
            text = RULES[rule]
            self.findings.append(Finding(rule, text.level, message, where, text.why, text.mend))

    def stop(self, rule: str, message: str, where: str = "") -> StopCheckError:
        """Record a finding after which the check cannot continue; returns the exception to raise."""
        self.report(rule, message, where)
        return StopCheckError(rule)

    @contextmanager
    def crashes_are(self, rule: str) -> Iterator[None]:
        """Report exceptions of ``reset`` and ``step`` under ``rule`` within the context."""
        before, self._crash_rule = self._crash_rule, rule
        try:
            yield
        finally:
            self._crash_rule = before

    def make(self) -> Env:
        """Makes a new environment."""
        outcome = self.loop.call("the constructor", self._maker)
        self.lines.add(self.made or Environment)
        made = self.value(outcome, "construct", "making the environment", "")
        if not isinstance(made, Environment):
            raise self.stop("construct", f"this makes a {type(made).__name__}, which is no agentrl.Environment")
        self.made = type(made.unwrapped)
        self.lines.add(made)
        return made

    def ask(self, rule: str, what: str, function: Callable[..., Any], *args: Any, where: str = "") -> Any:
        """Calls one of the environment's functions; a failure breaks ``rule``."""
        return self.value(self.loop.call("", function, *args), rule, what, where)

    def value(self, outcome: Outcome, rule: str, what: str, where: str) -> Any:
        """Returns the value of an outcome.

        Raises:
            StopCheckError: The call raised or hung, so the outcome has no value.
        """
        if outcome.hung is not None:
            raise self.stop("hang", f"{what} did not end within {outcome.seconds:.3g} s", outcome.hung or where)
        error = outcome.error
        if error is None:
            return outcome.value
        if isinstance(error, NoTasksError):
            raise self.stop("no-task", str(error), self.lines.of_class(self.made) if self.made else where)
        text = f"{what} raised {type(error).__name__}" + (f": {error}" if str(error) else "")
        raise self.stop(rule, text[:500], self.lines.of_error(error) or where)

    def reset(self, env: Env, seed: int | None, options: Any) -> Any:
        """Calls ``env.reset`` and returns the observation."""
        self.seen.episodes += 1
        where = self.lines.of_method(env, "reset")
        outcome = self.loop.call("reset", env.reset, seed=seed, options=options)
        result = self.value(outcome, self._crash_rule, "reset", where)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.stop("return", f"reset returned {_what(result)}; want (observation, info)", where)
        self._check_info(result[1], "reset", where)
        return result[0]

    def step(self, env: Env, action: Any) -> tuple[Any, Any, bool, bool]:
        """Calls ``env.step`` and returns observation, reward, terminated and truncated."""
        self.seen.steps += 1
        where = self.lines.of_method(env, "step", "judge", "reward")
        said = f"step, given {short(action)},"
        outcome = self.loop.call("step", env.step, action)
        rule = "reward-type" if isinstance(outcome.error, InvalidNumber) else self._crash_rule
        result = self.value(outcome, rule, said, where)
        if not isinstance(result, tuple) or len(result) != 5:
            wanted = "want (observation, reward, terminated, truncated, info)"
            raise self.stop("return", f"step returned {_what(result)}; {wanted}", where)
        observation, reward, terminated, truncated, info = result
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if type(value).__name__ not in ("bool", "bool_"):  # bool_ is numpy's bool
                raise self.stop("return", f"step returned {name}={short(value)}; want a bool", where)
        self._check_info(info, "step", where)
        self._check_reward(env, reward, action)
        return observation, reward, bool(terminated), bool(truncated)

    def close(self, env: Env, what: str = "close") -> None:
        """Calls ``env.close``."""
        outcome = self.loop.call("close", env.close)
        self.value(outcome, "close", what, self.lines.of_method(env, "close"))

    def open_now(self) -> Snapshot:
        """Takes a snapshot of the open resources."""
        return Snapshot.take(self.loop.tasks())

    def report_leaks(self, rule: str, since: Snapshot, when: str, env: Env) -> bool:
        """Report resources that are still open; returns whether there are any."""
        leaks = self.watch.leaks(since, self.loop.tasks)
        for leak in leaks:
            where = leak.where or self.lines.of_method(env, "close", "step", "reset")
            self.report(rule, f"{when}, a {leak.kind} is still open: {leak.name}", where)
        return bool(leaks)

    def _check_info(self, info: Any, method: str, where: str) -> None:
        if not isinstance(info, dict):
            raise self.stop("return", f"{method} returned info={short(info)}; want a dict", where)
        try:
            checked_metrics(info.get("metrics", {}), f"{method} returned info['metrics']")
        except TypeError as error:
            self.report("info", str(error), where)

    def _check_reward(self, env: Env, reward: Any, action: Any) -> None:
        where = self.lines.of_method(env, "step", "judge", "reward", "call_reward")
        given = f"step, given {short(action)},"
        if reward is None:
            self.report("reward-missing", f"{given} returned no reward", where)
            return
        try:
            number = finite(reward, given)
        except InvalidNumber as error:
            self.report("reward-type", str(error), where)
            return
        self.seen.rewards.append(number)
        low, high = env.reward_range
        if not low - 1e-9 <= number <= high + 1e-9:
            text = f"{given} returned reward {number:g}, outside of reward_range ({low:g}, {high:g})"
            self.report("reward-range", text, where)


def is_async(function: Any) -> bool:
    """Whether a function is defined as a coroutine function."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or asyncio.iscoroutinefunction(function)


def _what(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
