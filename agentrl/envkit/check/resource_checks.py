"""Checks for leaked resources, a blocked event loop, changed process state, and use in a new process.

Guarantees: each function checks exactly the rules that :mod:`~agentrl.envkit.check.checker` lists for it.
"""

import asyncio
import pickle
import statistics
from collections import defaultdict
from typing import Any

from agentrl.envkit.check.case import Case
from agentrl.envkit.check.compare import snapshot
from agentrl.envkit.check.fresh import FreshProcessError, in_new_process
from agentrl.envkit.check.stalls import STALL_SECONDS
from agentrl.envkit.check.subject import Env, SkipCheckError, StopCheckError
from agentrl.envkit.check.trials import Trace, difference, odd_actions

CONFIRM = 2  # stalls at one line to report it: a single one may be caused by the machine
CANCELS = 12  # largest number of awaits of a call at which it is cancelled, evenly spread


def check_close(case: Case) -> None:
    """Check that ``close`` works in any state and twice, and leaves no resource open."""
    subject = case.subject
    for state in ("before reset", "in mid-episode", "after an episode"):
        since = subject.open_now()
        env = subject.make()
        if state == "in mid-episode":
            subject.reset(env, case.seed(0), case.task(0))
        elif state == "after an episode":
            case.play(env, 0)
        subject.close(env, f"close {state}")
        subject.close(env, f"a second close {state}")
        if subject.report_leaks("close-leak", since, f"after close {state}", env):
            raise StopCheckError("close-leak")


def check_cancellation(case: Case) -> None:
    """Check that a call cancelled at any of its awaits ends, and that ``close`` then leaves no resource open."""
    subject = case.subject
    _cancel_everywhere(case, "reset", None)
    with case.env() as env:
        actions = case.actions(env, 1)[:2]
        actions += [one for name, one in odd_actions(subject, env, case.settings.seed).items() if "a call of" in name]
    for action in actions:
        _cancel_everywhere(case, "step", action)
    if not subject.seen.awaits:
        raise SkipCheckError("reset and step never wait, so they cannot be cancelled")


def _cancel_everywhere(case: Case, name: str, action: Any) -> None:
    """Cancel a call at its awaits, one after the other, until the first finding."""
    subject = case.subject
    with case.env() as env:
        waits = _call(case, env, name, action, 0).suspensions
    for point in sorted({1 + index * waits // min(waits, CANCELS) for index in range(min(waits, CANCELS))}):
        before = len(subject.findings)
        since = subject.open_now()
        env = subject.make()
        where = subject.lines.of_method(env, name)
        outcome = _call(case, env, name, action, point)
        when = f"{name}, cancelled at its await {point} of {waits},"
        subject.seen.awaits += 1
        if outcome.hung is not None:
            raise subject.stop("cancel-swallowed", f"{when} did not end", outcome.hung or where)
        if outcome.error is None and outcome.suspensions >= point:
            subject.report("cancel-swallowed", f"{when} returned as if nothing had happened", where)
        elif outcome.error is not None and not isinstance(outcome.error, asyncio.CancelledError):
            text = f"{when} raised {type(outcome.error).__name__} in its place"
            subject.report("cancel-swallowed", text, subject.lines.of_error(outcome.error) or where)
        subject.close(env, f"close, after {name} was cancelled at its await {point} of {waits},")
        subject.report_leaks("cancel-leak", since, f"after {when} and close", env)
        if len(subject.findings) > before:
            return


def _call(case: Case, env: Env, name: str, action: Any, cancel_at: int) -> Any:
    loop = case.subject.loop
    options = case.subject.ask("dataset", "copying the task", snapshot, case.task(0))
    if name == "reset":
        return loop.call("", env.reset, cancel_at=cancel_at, seed=case.seed(0), options=options)
    case.subject.reset(env, case.seed(0), options)
    return loop.call("", env.step, action, cancel_at=cancel_at)


def check_fresh_process(case: Case) -> None:
    """Check that a new process can make the environment and plays the same episode."""
    subject, owner = case.subject, case.subject.made
    assert owner is not None
    where = subject.lines.of_class(owner)
    if not isinstance(case.target, str):
        if not isinstance(case.target, type):
            raise SkipCheckError("it is made by a function; give an id or a path to have it made in a new process")
        subject.ask("new-process", f"pickling {owner.__name__}", pickle.dumps, case.target, where=where)
        return
    with case.env() as env:
        spec = env.spec
        assert spec is not None
        actions = case.actions(env, 0) if case.first is not None else []
    order = (spec.entry_point, spec.kwargs, case.seed(0), case.task(0), actions)
    pickled = subject.ask("new-process", "pickling settings, task and actions", pickle.dumps, order, where=where)
    try:
        said = in_new_process(pickled)
    except FreshProcessError as error:
        raise subject.stop("new-process", f"a new process cannot make and play it: {error}", where) from error
    if said and case.first is not None:
        keys = ("observation", "reward", "terminated", "truncated")
        steps: list[dict[str, Any]] = [dict(zip(keys, one, strict=True)) for one in said[1:]]
        found = difference(subject, case.first, Trace([{"observation": said[0]}, *steps]))
        if found:
            text = f"the episode of seed {case.seed(0)} is another one in a new process, at {found}"
            methods = ("reset", "prompt") if found.startswith("reset") else ("step", "judge", "reward")
            subject.report("same-seed", text, subject.lines.of_method(owner, *methods))


def check_blocking(case: Case) -> None:
    """Check that no line blocks the event loop, over all episodes."""
    stalls = defaultdict(list)
    for stall in case.subject.loop.watch.stalls:
        stalls[stall.where].append(stall)
    for where, seen in stalls.items():
        if len(seen) >= CONFIRM:
            typical = statistics.median(stall.seconds for stall in seen) * 1000
            limit = f"over {STALL_SECONDS * 1000:.0f} ms, {len(seen)} times"
            text = f"{seen[0].label} blocked the event loop for {typical:.0f} ms ({limit})"
            case.subject.report("blocks-loop", text, where)


def check_process_state(case: Case) -> None:
    """Check that environment variables and working folder were not changed."""
    for kind, _, where in case.subject.watch.opened:
        if kind in ("environment", "folder"):
            what = "an environment variable" if kind == "environment" else "the working folder"
            case.subject.report("global-state", f"{what} of the process was changed", where)


def check_background(case: Case) -> None:
    """Check that no background task failed unnoticed."""
    for text, where in case.subject.loop.strays:
        case.subject.report("background-error", text, where or case.subject.lines.of_class(case.subject.made))
