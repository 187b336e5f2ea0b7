"""State shared by all checks: the environment, the settings, the tasks, and the played episodes.

Guarantees: episode ``n`` always has the same seed, task and actions.
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
    """Settings of a check: the number of episodes and their limits.

    Attributes:
        episodes: Number of episodes with sampled actions.
        steps: Largest number of actions in an episode.
        seed: Seed of the first episode; each further episode adds 1.
        seconds: Time limit of one call, in seconds.
        load_seconds: Time limit of the first import, construction and reading of the tasks, in seconds.
        total_seconds: Time limit of the whole check, in seconds.
        task: The ``options`` of ``reset``; ``None`` for tasks of the environment's dataset.
        actions: Actions to try before the sampled ones.
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
    """An environment under check, with its settings and tasks.

    Attributes:
        subject: The environment.
        settings: Number of episodes and their limits.
        target: The environment to check: an id, a path, a class or a function that makes it.
        kwargs: Arguments of the environment, if ``target`` is an id.
        tasks: The ``options`` of ``reset``, used in turn; ``[None]`` if the environment draws its own tasks.
        first: Episode 0, once it is known to be reproducible.
    """

    subject: Subject
    settings: Settings
    target: Any
    kwargs: dict[str, Any]
    tasks: list[dict[str, Any] | None] = field(default_factory=lambda: [None])
    first: Trace | None = None

    @contextmanager
    def env(self) -> Iterator[Env]:
        """Makes an environment and closes it at the end; errors of ``close`` are left to another check."""
        env = self.subject.make()
        try:
            yield env
        finally:
            with suppress(CannotGoOnError):
                self.subject.loop.call("close", env.close)

    def seed(self, number: int) -> int:
        """Returns the seed of an episode."""
        return self.settings.seed + number

    def task(self, number: int) -> dict[str, Any] | None:
        """Returns the task of an episode."""
        return self.tasks[number % len(self.tasks)]

    def actions(self, env: Env, number: int) -> list[Any]:
        """Returns the actions of an episode; every second episode begins with the given actions and right answers."""
        sampled = sampled_actions(self.subject, env, self.seed(number), self.settings.steps)
        first = [*self.settings.actions, *right_answers(env, self.task(number))] if number % 2 else []
        return [*first, *sampled]

    def play(self, env: Env, number: int) -> Trace:
        """Plays an episode in a given instance."""
        return play(self.subject, env, self.seed(number), self.task(number), self.actions(env, number))

    def episode(self, number: int) -> Trace:
        """Plays an episode in a new instance."""
        with self.env() as env:
            return self.play(env, number)
