"""``check_environment``: runs all checks, one after the other.

Guarantees: it returns a report whatever the environment does, unless it ends the process; a rule that could not be
checked is in the report with the reason; environment variables and working folder are restored, child processes ended.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.environment import Environment
from agentrl.core.registry import spec_of
from agentrl.envkit.check import contract_checks as contract
from agentrl.envkit.check import episode_checks as episodes
from agentrl.envkit.check import resource_checks as resources
from agentrl.envkit.check.case import Case, Settings
from agentrl.envkit.check.findings import Level, Report
from agentrl.envkit.check.leaks import OpenWatch, children, end_children
from agentrl.envkit.check.loop import CannotGoOnError, EnvLoop
from agentrl.envkit.check.source_lines import UserLines
from agentrl.envkit.check.subject import SkipCheckError, StopCheckError, Subject
from agentrl.envkit.make import make

Target = str | type[Environment[Any, Any]] | Callable[[], Environment[Any, Any]]


@dataclass(frozen=True)
class _Check:
    """A check function, the rules it checks, and the checks that must have passed before."""

    function: Callable[[Case], None]
    rules: tuple[str, ...]
    needs: tuple[Callable[[Case], None], ...] = ()


_IN_EPISODES = (
    *("no-task", "raises", "hang", "return", "info", "observation-space", "reward-type", "reward-range"),
    *("reward-missing", "empty-observation", "options-mutated", "action-mutated", "observation-reused"),
)
_SPACES = (contract.check_construct, contract.check_signature, contract.check_spaces)
_TASKS = (*_SPACES, contract.check_tasks)
_EPISODES = (*_TASKS, contract.check_episodes)
_SAME_SEED = (*_EPISODES, episodes.check_same_seed)
_CHECKS = (
    _Check(contract.check_construct, ("construct",)),
    _Check(contract.check_signature, ("signature",), _SPACES[:1]),
    _Check(contract.check_spaces, ("spaces", "tool-description"), _SPACES[:2]),
    _Check(contract.check_tasks, ("dataset", "held-out"), _SPACES),
    _Check(contract.check_episodes, _IN_EPISODES, _TASKS),
    _Check(contract.check_odd_actions, ("odd-action",), _EPISODES),
    _Check(contract.check_tools, ("tool-broken",), _EPISODES),
    _Check(episodes.check_same_seed, ("same-seed",), _EPISODES),
    _Check(episodes.check_different_seeds, ("different-seeds",), _EPISODES),
    _Check(episodes.check_reset_after_done, ("reset-after-done",), _SAME_SEED),
    _Check(episodes.check_reset_mid_episode, ("reset-mid-episode",), (*_SAME_SEED, episodes.check_reset_after_done)),
    _Check(episodes.check_step_before_reset, ("step-before-reset",), _EPISODES),
    _Check(episodes.check_step_after_done, ("step-after-done",), _EPISODES),
    _Check(episodes.check_instances, ("shared-state",), _SAME_SEED),
    _Check(resources.check_close, ("close", "close-leak"), _EPISODES),
    _Check(resources.check_cancellation, ("cancel-leak", "cancel-swallowed"), (*_EPISODES, resources.check_close)),
    _Check(resources.check_fresh_process, ("new-process",), _SPACES[:1]),
    _Check(contract.check_rewards, ("equal-rewards",), _EPISODES),
    _Check(resources.check_blocking, ("blocks-loop",), _EPISODES),
    _Check(resources.check_process_state, ("global-state",), _EPISODES),
    _Check(resources.check_background, ("background-error",), _EPISODES),
)


def check_environment(
    target: Target, *, kwargs: dict[str, Any] | None = None, settings: Settings | None = None
) -> Report:
    """Check that an environment keeps the contract and withstands what training does to it.

    It can be called with or without a running event loop: the environment runs on a separate one.

    Args:
        target: A registered id, a path (``envs/mine.py:Mine``), a class, or a function that makes the environment.
        kwargs: Arguments of the environment, if ``target`` is an id or a class.
        settings: Number of episodes and their limits.

    Returns:
        A report with the findings, the rules that are met, and those that could not be checked.
    """
    settings, kwargs = settings or Settings(), kwargs or {}
    name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
    target = _lasting(target)
    started, before = time.monotonic(), set(children())
    lines = UserLines()
    with (
        _process_kept(),
        OpenWatch(lines) as watch,
        EnvLoop(lines, settings.seconds, settings.total_seconds) as loop,
    ):
        maker = (lambda: make(target, **kwargs)) if isinstance(target, str) else (lambda: target(**kwargs))
        subject = Subject(maker, loop, lines, watch)
        passed, skipped = _run(Case(subject, settings, target, kwargs))
        end_children(besides=before)  # while the loop can still notice their end
    broken = {finding.check for finding in subject.findings}
    return Report(
        name=name,
        findings=tuple(sorted(subject.findings, key=lambda finding: list(Level).index(finding.level))),
        passed=tuple(rule for rule in passed if rule not in broken),
        skipped={rule: reason for rule, reason in skipped.items() if rule not in broken},
        numbers=_numbers(subject, time.monotonic() - started),
    )


def _lasting(target: Target) -> Target:
    """Makes a file path in the target absolute, because the environment may change the working folder."""
    if not isinstance(target, str):
        return target
    with contextlib.suppress(LookupError):  # an unknown target becomes a finding later
        file, _, name = spec_of("env", target).entry_point.rpartition(":")
        if file.endswith(".py") and Path(file).is_file():
            return f"{Path(file).resolve()}:{name}"
    return target


def _run(case: Case) -> tuple[list[str], dict[str, str]]:
    passed: list[str] = []
    skipped: dict[str, str] = {}
    done: dict[Callable[[Case], None], str] = {}  # why each check did not pass; empty if it did
    for check in _CHECKS:
        reason = next((done[need] for need in check.needs if done[need]), "")
        if not reason:
            reason = _outcome(check, case)
        done[check.function] = reason if not reason.startswith("not applicable") else ""
        for rule in check.rules:
            if reason:
                skipped[rule] = reason.removeprefix("not applicable: ")
            else:
                passed.append(rule)
    return passed, skipped


def _outcome(check: _Check, case: Case) -> str:
    try:
        check.function(case)
    except SkipCheckError as error:
        return f"not applicable: {error}"
    except StopCheckError as error:
        return f"needs {error} to be mended first"
    except CannotGoOnError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Restores the process's environment variables and working folder."""
    variables, folder = dict(os.environ), Path.cwd()
    try:
        yield
    finally:
        os.chdir(folder)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def _numbers(subject: Subject, seconds: float) -> dict[str, float]:
    seen = subject.seen
    numbers: dict[str, float] = {
        "episodes": seen.episodes,
        "steps": seen.steps,
        "cancelled_awaits": seen.awaits,
        "seconds": round(seconds, 2),
    }
    if seen.rewards:
        numbers |= {"reward_min": min(seen.rewards), "reward_max": max(seen.rewards)}
    return numbers
