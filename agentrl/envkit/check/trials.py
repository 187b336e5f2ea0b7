"""Plays episodes of the environment under check, and chooses their actions.

Guarantees: actions depend on the seed alone; while an episode runs, it is checked that observations are in their space
and are not changed later, and that the task and the actions are not changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.envkit.check.compare import first_difference, short, snapshot
from agentrl.envkit.check.subject import Env, Subject
from agentrl.envkit.spaces.messages import MessageSpace, ToolCallSpace

LONG_TEXT = "so it is 7 and then " * 2500  # 50,000 characters, like a model that does not stop
_ANSWERS = ("answer", "solution", "target")  # keys of a task that may hold a right answer


@dataclass
class Trace:
    """The record of an episode.

    Attributes:
        said: Copies of the results of ``reset`` and of each step: observation, reward, terminated, truncated.
        ended: Whether the episode terminated or was truncated.
        returned: Each returned observation, with the copy taken at that time.
    """

    said: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    returned: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass
class Player:
    """Plays an episode of an environment action by action.

    Attributes:
        subject: The environment under check.
        env: The instance.
        seed: Seed of the episode.
        task: The ``options`` of ``reset``, which gets a copy; ``None`` if the environment draws a task.
    """

    subject: Subject
    env: Env
    seed: int
    task: dict[str, Any] | None
    trace: Trace = field(default_factory=Trace)

    def start(self) -> None:
        """Reset the environment."""
        self.trace = Trace()
        options = self.subject.ask("dataset", "copying the task", snapshot, self.task)
        observation = self.subject.reset(self.env, self.seed, options)
        difference = self.subject.ask("dataset", "comparing tasks", first_difference, options, self.task)
        if difference:
            where = self.subject.lines.of_method(self.env, "reset", "prompt")
            self.subject.report("options-mutated", f"reset changed the task it was given: {difference}", where)
        self._options, self._before = options, self.subject.ask("dataset", "copying the task", snapshot, options)
        self._keep(observation, "reset", "prompt", said={})

    def act(self, action: Any) -> None:
        """Take a step, unless the episode is over."""
        if self.trace.ended:
            return
        given = self.subject.ask("spaces", "copying an action", snapshot, action)
        observation, reward, terminated, truncated = self.subject.step(self.env, given)
        self.trace.ended = terminated or truncated
        where = self.subject.lines.of_method(self.env, "step", "judge", "reward")
        for rule, now, before, what in (
            ("action-mutated", given, action, "action"),
            ("options-mutated", self._options, self._before, "task"),
        ):
            difference = self.subject.ask("spaces", "comparing actions", first_difference, now, before)
            if difference:
                self.subject.report(rule, f"step changed the {what} it was given: {difference}", where)
        said = {"reward": reward, "terminated": terminated, "truncated": truncated}
        self._keep(observation, "step", said=said)

    def _keep(self, observation: Any, *methods: str, said: dict[str, Any]) -> None:
        subject, where = self.subject, self.subject.lines.of_method(self.env, *methods)
        space = self.env.observation_space
        if not subject.ask("spaces", "observation_space.contains", space.contains, observation, where=where):
            text = f"{methods[0]} returned {_outside(space, observation)}, which is not in {short(space)}"
            subject.report("observation-space", text, where)
        if isinstance(observation, list | tuple) and not observation and not self.trace.ended:
            text = f"{methods[0]} returned no message" + (" and did not end the episode" if said else "")
            subject.report("empty-observation", text, where)
        copied = subject.ask("raises", "copying the observation", snapshot, observation, where=where)
        for number, (one, before) in enumerate(self.trace.returned):
            difference = subject.ask("raises", "comparing observations", first_difference, one, before, where=where)
            if difference:
                text = f"the observation of {_moment(number)} was changed by a later step: {difference}"
                subject.report("observation-reused", text, where)
        self.trace.returned.append((observation, copied))
        self.trace.said.append({"observation": copied, **said})


def play(subject: Subject, env: Env, seed: int, task: Any, actions: Sequence[Any]) -> Trace:
    """Plays an episode until it ends or the actions are used up."""
    player = Player(subject, env, seed, task)
    player.start()
    for action in actions:
        player.act(action)
    return player.trace


def difference(subject: Subject, one: Trace, other: Trace) -> str:
    """Describes the first difference between two episodes; empty if there is none."""
    for number, (a, b) in enumerate(zip(one.said, other.said, strict=False)):
        found = subject.ask("raises", "comparing observations", first_difference, a, b)
        if found:
            return f"{_moment(number)}: {found}"
    return "" if len(one.said) == len(other.said) else f"{len(one.said) - 1} steps != {len(other.said) - 1}"


def sampled_actions(subject: Subject, env: Env, seed: int, count: int) -> list[Any]:
    """Samples actions from the environment's space."""
    space = env.action_space
    subject.ask("spaces", "action_space.seed", space.seed, seed)
    return [subject.ask("spaces", "action_space.sample", space.sample) for _ in range(count)]


def right_answers(env: Env, task: dict[str, Any] | None) -> list[Any]:
    """Returns messages with the task's own answers, so that not only wrong answers are judged."""
    if task is None or not isinstance(env.action_space, MessageSpace):
        return []
    return [{"role": "assistant", "content": str(task[key])} for key in _ANSWERS if key in task]


def odd_actions(subject: Subject, env: Env, seed: int) -> dict[str, Any]:
    """Returns malformed messages as models write them, by name, and one call of each tool."""
    space = env.action_space
    if not isinstance(space, MessageSpace):
        return {}

    def calling(*calls: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": list(calls)}

    def call(name: Any, arguments: Any) -> dict[str, Any]:
        return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}

    tools = space.calls.tools if space.calls is not None else []
    known = tools[0]["function"]["name"] if tools else "search"
    found = {
        "an empty answer": {"role": "assistant", "content": ""},
        "a very long answer": {"role": "assistant", "content": LONG_TEXT},
        "the same once more": {"role": "assistant", "content": LONG_TEXT},  # a single stall is not reported
        "a message whose content is None": {"role": "assistant", "content": None},
        "a message without content": {"role": "assistant"},
        "an unparsable tool call": calling(call(known, '{"query": "1 +')),
        "a call of an unknown tool": calling(call("no_such_tool", "{}")),
    }
    for tool in tools:
        calls = ToolCallSpace([tool], seed=seed)
        name = tool["function"]["name"]
        found[f"a call of {name}"] = calling(subject.ask("spaces", f"sampling a call of {name}", calls.sample))
    return found


def _outside(space: Any, observation: Any) -> str:
    message = getattr(space, "message", None)
    if message is not None and isinstance(observation, list):
        for number, one in enumerate(observation):
            if not message.contains(one):
                return f"message {number}, {short(one)}"
    return f"{short(observation)}, a {type(observation).__name__}"


def _moment(number: int) -> str:
    return f"step {number}" if number else "reset"
