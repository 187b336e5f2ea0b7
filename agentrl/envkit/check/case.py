"""What all checks share: the environment, the settings, the tasks, and the episodes that are played.

Guarantees: episode ``n`` has the same seed, task and actions whenever it is asked for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.envkit.check.loop import CannotGoOnError
from agentrl.envkit.check.subject import Env, Subject
from agentrl.envkit.check.trials import Trace, play, right_answers, sampled_actions


@dataclass(frozen=True)
class Settings:
    """How thoroughly to check.

    Attributes:
        episodes: Episodes with sampled actions.
        steps: Actions in one of them, at most.
        seed: Of the first; the others count on from it.
        seconds: One call may take.
        load_seconds: Importing, constructing and reading the tasks may take, the first time.
        total_seconds: All of it may take.
        task: What reset gets as options; ``None``: tasks of the environment's dataset.
        actions: Tried before the sampled ones.
    """

    episodes: int = 4
    steps: int = 16
    seed: int = 0
    seconds: float = 30.0
    load_seconds: float = 120.0
    total_seconds: float = 600.0
    task: dict[str, Any] | None = None
    actions: Sequence[Any] = ()


@dataclass
class Case:
    """One check of one environment.

    Attributes:
        subject: The environment.
        settings: How thoroughly.
        target: What was to be checked: an id, or what makes the environment.
        kwargs: Arguments of the environment, where ``target`` is an id.
        tasks: What reset gets, in turn; one ``None`` where the environment draws its own.
        first: Episode 0, once it is known to be the same each time.
    """

    subject: Subject
    settings: Settings
    target: Any
    kwargs: dict[str, Any]
    tasks: list[dict[str, Any] | None] = field(default_factory=lambda: [None])
    first: Trace | None = None

    @contextmanager
    def env(self) -> Iterator[Env]:
        """A new environment, closed at the end; whether closing works is another check's question."""
        env = self.subject.make()
        try:
            yield env
        finally:
            with suppress(CannotGoOnError):
                self.subject.loop.call("close", env.close)

    def seed(self, number: int) -> int:
        """The seed of an episode."""
        return self.settings.seed + number

    def task(self, number: int) -> dict[str, Any] | None:
        """The task of an episode."""
        return self.tasks[number % len(self.tasks)]

    def actions(self, env: Env, number: int) -> list[Any]:
        """The actions of an episode; every second one begins with the given ones and right answers."""
        sampled = sampled_actions(self.subject, env, self.seed(number), self.settings.steps)
        first = [*self.settings.actions, *right_answers(env, self.task(number))] if number % 2 else []
        return [*first, *sampled]

    def play(self, env: Env, number: int) -> Trace:
        """An episode in a given instance."""
        return play(self.subject, env, self.seed(number), self.task(number), self.actions(env, number))

    def episode(self, number: int) -> Trace:
        """An episode in a new instance."""
        with self.env() as env:
            return self.play(env, number)
