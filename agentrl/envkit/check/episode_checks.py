"""Checks that compare episodes of equal or different seeds, consecutive or concurrent, and steps outside an episode.

Guarantees: each function checks exactly the rules that :mod:`~agentrl.envkit.check.checker` lists for it.
"""

from dataclasses import replace
from typing import Any

from agentrl.envkit.check.case import Case
from agentrl.envkit.check.compare import first_difference
from agentrl.envkit.check.subject import Env, SkipCheckError
from agentrl.envkit.check.trials import Player, Trace, difference

SEEDS = 8  # number of seeds whose first observations must not all be equal


def check_same_seed(case: Case) -> None:
    """Check that two instances with equal seed, task and actions have equal episodes."""
    for number in range(2):
        one, other = case.episode(number), case.episode(number)
        _stop_at_difference(case, "same-seed", f"two episodes of seed {case.seed(number)} differ", one, other)
    if case.settings.task is None and case.tasks != [None]:  # tasks the environment draws itself
        own = replace(case, tasks=[None])
        one, other = own.episode(0), own.episode(0)
        _stop_at_difference(case, "same-seed", f"two episodes of seed {case.seed(0)} differ", one, other)
    case.first = case.episode(0)


def check_different_seeds(case: Case) -> None:
    """Check that not all seeds give the same first observation."""
    if case.settings.task is not None:
        raise SkipCheckError("the task is given, so all episodes may begin alike")
    subject = case.subject
    firsts = []
    for number in range(SEEDS):
        with case.env() as env:
            firsts.append(subject.reset(env, case.seed(number), None))
    where = subject.lines.of_method(subject.made, "reset", "prompt")
    if not any(subject.ask("raises", "comparing observations", first_difference, firsts[0], one) for one in firsts):
        subject.report("different-seeds", f"{SEEDS} seeds give the same first observation", where)


def check_reset_after_done(case: Case) -> None:
    """Check that an instance's second episode equals that of a new instance."""
    fresh = case.episode(0)
    if not fresh.ended:
        raise SkipCheckError(_unended(case))
    with case.env() as env, case.subject.crashes_are("reset-after-done"):
        case.play(env, 0)
        again = case.play(env, 0)
    text = f"an instance's second episode of seed {case.seed(0)} differs from its first"
    _stop_at_difference(case, "reset-after-done", text, fresh, again)


def check_reset_mid_episode(case: Case) -> None:
    """Check that an episode after an abandoned one equals that of a new instance."""
    fresh = case.episode(0)
    with case.env() as env, case.subject.crashes_are("reset-mid-episode"):
        player = _player(case, env, 1)
        player.start()
        if len(fresh.said) > 2:  # one step does not end the episode
            player.act(case.actions(env, 0)[0])
        again = case.play(env, 0)
    text = f"an episode of seed {case.seed(0)} that comes after one given up differs from a fresh one"
    _stop_at_difference(case, "reset-mid-episode", text, fresh, again)


def check_step_before_reset(case: Case) -> None:
    """Check that ``step`` before the first ``reset`` raises."""
    with case.env() as env:
        _must_raise(case, env, "step-before-reset", "step before the first reset")


def check_step_after_done(case: Case) -> None:
    """Check that ``step`` after the end of an episode raises."""
    with case.env() as env:
        trace = next((t for t in (case.play(env, number) for number in range(2)) if t.ended), None)
        if trace is None:
            raise SkipCheckError(_unended(case))
        _must_raise(case, env, "step-after-done", "step after the episode's end")


def check_instances(case: Case) -> None:
    """Check that concurrent episodes of two instances do not influence each other."""
    subject = case.subject
    alone = [case.episode(0), case.episode(1)]
    with case.env() as first, case.env() as second, subject.crashes_are("shared-state"):
        players = [_player(case, first, 0), _player(case, second, 1)]
        actions = [case.actions(first, 0), case.actions(second, 1)]
        for player in players:
            player.start()
        for turn in range(max(map(len, actions))):
            for player, own in zip(players, actions, strict=True):
                if turn < len(own):
                    player.act(own[turn])
    for number, player in enumerate(players):
        text = f"the episode of seed {case.seed(number)} differs when another instance has one at the same time"
        _stop_at_difference(case, "shared-state", text, alone[number], player.trace)


def _player(case: Case, env: Env, number: int) -> Player:
    return Player(case.subject, env, case.seed(number), case.task(number))


def _stop_at_difference(case: Case, rule: str, text: str, one: Trace, other: Trace) -> None:
    found = difference(case.subject, one, other)
    if found:
        methods = ("reset", "prompt") if found.startswith("reset") else ("step", "judge", "reward")
        where = case.subject.lines.of_method(case.subject.made, *methods)
        raise case.subject.stop(rule, f"{text}, at {found}", where)


def _must_raise(case: Case, env: Env, rule: str, what: str) -> None:
    subject = case.subject
    action: Any = case.actions(env, 0)[0]
    where = subject.lines.of_method(env, "step", "judge", "reward")
    outcome = subject.loop.call("step", env.step, action)
    if outcome.hung is not None:
        subject.report(rule, f"{what} did not end", outcome.hung or where)
    elif outcome.error is None:
        subject.report(rule, f"{what} raised nothing", where)


def _unended(case: Case) -> str:
    return f"no episode ended within {case.settings.steps} sampled actions"
