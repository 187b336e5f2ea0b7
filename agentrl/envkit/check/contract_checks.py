"""Checks of the contract: methods, spaces, and the values that ``reset`` and ``step`` return.

Guarantees: each function checks exactly the rules that :mod:`~agentrl.envkit.check.checker` lists for it.
"""

import inspect
from typing import Any

from gymnasium import Space

from agentrl.core.task_source import NoTasksError
from agentrl.envkit.check.case import Case
from agentrl.envkit.check.compare import short
from agentrl.envkit.check.subject import SkipCheckError, is_async
from agentrl.envkit.check.trials import odd_actions, play
from agentrl.envkit.language import LanguageEnvironment
from agentrl.envkit.spaces.messages import MessageSpace, ToolCallSpace
from agentrl.envkit.tools.tool import collect_tools

FIRST_TASKS = 4  # tasks of a dataset that are used
CALLS = 3  # sampled calls of each tool
BUGS = ("NameError", "AttributeError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SystemExit")


def check_construct(case: Case) -> None:
    """Check that the environment can be constructed."""
    with case.subject.loop.patient(case.settings.load_seconds):
        case.subject.make()


def check_signature(case: Case) -> None:
    """Check that the contract's methods are async and take the rollout's arguments."""
    subject, owner = case.subject, case.subject.made
    assert owner is not None
    wanted: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "reset": ((None,), {"seed": 0, "options": None}),
        "step": ((None, None), {}),
        "judge_unfinished": ((None,), {}),
        "close": ((None,), {}),
    }
    broken = []
    for name, (args, kwargs) in wanted.items():
        function = inspect.getattr_static(owner, name)
        where = subject.lines.of_method(owner, name)
        if not callable(function):
            broken.append((f"{name} is {short(function)}, not a method", where))
            continue
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            broken.append((f"{name}{inspect.signature(function)} cannot be called as the rollout does: {error}", where))
        if not is_async(function):
            broken.append((f"{name} is not async: what it returns cannot be awaited", where))
    for message, where in broken:
        subject.report("signature", message, where)
    if broken:
        raise subject.stop("signature", *broken[0])


def check_spaces(case: Case) -> None:
    """Check that both spaces exist and that tools have descriptions."""
    subject = case.subject
    with case.env() as env:
        where = subject.lines.of_class(env)
        for name in ("observation_space", "action_space"):
            space = subject.ask("spaces", name, getattr, env, name, where=where)
            if not isinstance(space, Space):
                raise subject.stop("spaces", f"{name} is {short(space)}, which is no gymnasium.Space", where)
        if isinstance(env.unwrapped, LanguageEnvironment):
            for tool in subject.ask("spaces", "collecting the tools", collect_tools, env.unwrapped, where=where):
                if not tool.description:
                    line = subject.lines.of_method(env, getattr(tool.function, "__name__", tool.name))
                    subject.report("tool-description", f"the tool {tool.name} has no description", line)


def check_tasks(case: Case) -> None:
    """Check that the dataset can be read."""
    owner, task = case.subject.made, case.settings.task
    assert owner is not None
    if task is not None:
        case.tasks = [task]
        raise SkipCheckError("a task was given")
    if getattr(owner, "dataset", None) is None:
        raise SkipCheckError("the class has no dataset")
    with case.env() as env, case.subject.loop.patient(case.settings.load_seconds):
        where = case.subject.lines.of_class(env)
        tasks = case.subject.ask(
            "dataset", "reading the dataset", env.unwrapped.own_tasks, env.unwrapped.split, where=where
        )
    case.tasks = list(tasks[:FIRST_TASKS])
    with case.env() as env, case.subject.loop.patient(case.settings.load_seconds):
        try:
            env.unwrapped.own_tasks("test")
        except NoTasksError as error:
            case.subject.report("held-out", str(error), where)


def check_episodes(case: Case) -> None:
    """Check the contract in episodes with sampled actions; stalls of the first one are ignored as warm-up."""
    for number in range(max(case.settings.episodes, 2)):
        case.episode(number)
        if number == 0:
            case.subject.loop.watch.stalls.clear()


def check_odd_actions(case: Case) -> None:
    """Check that malformed messages of a model do not make the environment raise."""
    subject = case.subject
    with case.env() as env:
        odd = odd_actions(subject, env, case.settings.seed)
    if not odd:
        raise SkipCheckError("actions are no messages")
    with subject.crashes_are("odd-action"):
        for action in odd.values():
            with case.env() as env:
                play(subject, env, case.settings.seed, case.task(0), [action])


def check_tools(case: Case) -> None:
    """Check that no tool answers all of its sampled calls with an exception that indicates a bug."""
    subject = case.subject
    with case.env() as env:
        space = env.action_space
        tools = space.calls.tools if isinstance(space, MessageSpace) and space.calls is not None else []
    if not tools:
        raise SkipCheckError("there are no tools")
    for tool in tools:
        name = tool["function"]["name"]
        said = [_answer_of(case, tool, seed) for seed in range(CALLS)]
        if all(text.startswith(BUGS) for text in said):
            text = f"all {CALLS} sampled calls of {name} were answered with {short(said[0])}"
            subject.report("tool-broken", text, subject.lines.of_method(subject.made, name))


def _answer_of(case: Case, tool: dict[str, Any], seed: int) -> str:
    """Returns the answer to a sampled call of a tool; empty if there is none."""
    call = case.subject.ask("spaces", "sampling a call", ToolCallSpace([tool], seed=seed).sample)
    action = {"role": "assistant", "content": "", "tool_calls": [call]}
    with case.env() as env:
        observation = play(case.subject, env, case.settings.seed, case.task(0), [action]).said[-1]["observation"]
    first = observation[0] if isinstance(observation, list) and observation else {}
    return str(first.get("content")) if isinstance(first, dict) and first.get("role") == "tool" else ""


def check_rewards(case: Case) -> None:
    """Check that not all rewards are equal."""
    rewards = case.subject.seen.rewards
    if len(rewards) < 2:
        raise SkipCheckError("fewer than two rewards were seen")
    if len(set(rewards)) == 1:
        owner = case.subject.made
        where = case.subject.lines.of_method(owner, "step", "judge", "reward")
        case.subject.report("equal-rewards", f"all {len(rewards)} sampled rewards are {rewards[0]:g}", where)
