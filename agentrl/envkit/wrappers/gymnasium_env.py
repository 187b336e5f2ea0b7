"""Makes an environment for language agents of any ``gymnasium.Env`` whose spaces can be described in text.

Guarantees: seeds, rewards, terminated and truncated pass through unchanged; an answer without a valid action gets a
message with the allowed actions, and never becomes a random or default action; the environment does not block the
event loop, and its steps never run concurrently. A step that hangs fails its own episode with a typed error; the
environment is dropped, and the next episode makes a new one.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from agentrl.core.environment import Info
from agentrl.core.episode import Message
from agentrl.core.task_source import Source
from agentrl.envkit.language import LanguageEnvironment
from agentrl.envkit.wrappers.gymnasium_source import EnvSource, SeedTasks
from agentrl.envkit.wrappers.held_env import Env, HeldEnv
from agentrl.envkit.wrappers.space_text import MAX_NUMBERS, ParseError
from agentrl.envkit.wrappers.translate import Observe, Translator
from agentrl.host.worker_errors import WorkerTimeoutError
from agentrl.host.worker_threads import in_thread

T = TypeVar("T")
TRAIN_SEEDS = 10_000
TEST_SEEDS = 500
FIRST_TEST_SEED = 1_000_000  # far above all training seeds


class StepTimeoutError(RuntimeError):
    """Raised if a ``reset`` or ``step`` takes too long; no TimeoutError, which would mean the episode's deadline."""


class GymnasiumEnvironment(LanguageEnvironment):
    """A ``gymnasium.Env`` with observations and actions as text.

    A task is ``{"seed": int}``; other keys go to the environment as its ``options``. The task's seed overrides that
    of ``reset``, so that all episodes of a group start in the same state; without a task the seed of ``reset`` is
    used. ``info["gymnasium"]`` is the environment's own info. Metrics: ``steps`` and ``invalid_actions``.

    Args:
        env: Gymnasium id (``module:Id-v0`` imports the module first), a function that makes an environment, or an
            environment. An environment object cannot be used after ``close`` or after a step that hangs.
        instructions: Start of the first message; by default the rules, if the game is one of Gymnasium's toy texts.
        action_names: Names of a ``Discrete`` space's actions, in order; known for toy-text games.
        describe: Function from an observation to text; replaces the text made from the space.
        parse: Function from an answer's text to an action; its :class:`~agentrl.wrappers.ParseError` is shown to the
            model.
        observe: ``render`` shows the drawing of ``render_mode="ansi"``, then the text of ``describe``; ``space`` never
            draws; ``auto`` draws if the environment can and no ``describe`` is given.
        max_steps: Number of steps after which the episode is truncated, besides the environment's own limit.
        max_invalid: Number of answers without an action after which the episode is truncated; ``None`` for no limit.
        invalid_reward: Reward of an answer without an action.
        run_in: ``thread``, or ``loop`` for steps that take microseconds, without a time limit.
        step_timeout: Time limit of one ``reset`` or ``step`` in a thread, in seconds.
        max_numbers: Largest number of numbers that a space described in text may have.
        make_kwargs: Arguments of ``gymnasium.make``, or of the function.

    Raises:
        LookupError: Gymnasium does not know the id.
        TypeError: The environment does not take ``make_kwargs``.
    """

    dataset: ClassVar[Source | None] = {
        "train": SeedTasks(0, TRAIN_SEEDS),
        "test": SeedTasks(FIRST_TEST_SEED, TEST_SEEDS),
    }

    def __init__(
        self,
        env: str | Env | Callable[..., Env],
        *,
        instructions: str | None = None,
        action_names: Sequence[str] | None = None,
        describe: Callable[[Any], str] | None = None,
        parse: Callable[[str], Any] | None = None,
        observe: Observe = "auto",
        max_steps: int | None = None,
        max_invalid: int | None = 3,
        invalid_reward: float = 0.0,
        run_in: Literal["thread", "loop"] = "thread",
        step_timeout: float = 30.0,
        max_numbers: int = MAX_NUMBERS,
        **make_kwargs: Any,
    ) -> None:
        for name, value, choices in (
            ("observe", observe, ("auto", "render", "space")),
            ("run_in", run_in, ("thread", "loop")),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
        for name, value in (("max_steps", max_steps), ("max_invalid", max_invalid), ("step_timeout", step_timeout)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        self.max_steps = max_steps
        self.max_invalid = max_invalid
        self.invalid_reward = invalid_reward
        self.run_in = run_in
        self.step_timeout = step_timeout
        self._source = EnvSource(env, make_kwargs, draw=observe != "space")
        self._words: dict[str, Any] = {
            "instructions": instructions,
            "action_names": action_names,
            "describe": describe,
            "parse": parse,
            "observe": observe,
            "max_numbers": max_numbers,
        }
        self.name = self._source.name
        self._translator: Translator | None = None
        self._held: HeldEnv | None = None
        self._gone = False
        self._busy = False
        self._playing = False
        self._steps = 0
        self._invalid = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start an episode.

        Raises:
            StepTimeoutError: The reset took longer than ``step_timeout``.
        """
        self._playing = False
        own, rest = self._seed_of(seed, options), {k: v for k, v in (options or {}).items() if k != "seed"}
        observed, info = await self._run("reset", self._reset, own, rest or None)
        self._steps = self._invalid = 0
        self._playing = True
        return self._words_of().opening(observed), {"gymnasium": info, "metrics": self._metrics()}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Take the action in the message, or answer why it has none.

        Raises:
            StepTimeoutError: The step took longer than ``step_timeout``.
        """
        if not self._playing:
            raise RuntimeError(f"{type(self).__name__}.step called before reset, or after the episode's end")
        translator = self._words_of()
        try:
            chosen = translator.action(action)
        except ParseError as error:
            self._invalid += 1
            over = self.max_invalid is not None and self._invalid >= self.max_invalid
            self._playing = not over
            return translator.refusal(error), self.invalid_reward, False, over, {"metrics": self._metrics()}
        self._playing = False  # also if the step raises: the episode is over then
        observed, reward, terminated, truncated, info = await self._run("step", self._step, chosen)
        self._steps += 1
        if self.max_steps is not None and self._steps >= self.max_steps and not terminated:
            truncated = True
        self._playing = not (terminated or truncated)
        content: list[Message] = [{"role": "user", "content": observed}]
        return content, reward, terminated, truncated, {"gymnasium": info, "metrics": self._metrics()}

    async def close(self) -> None:
        """Close the environment, after a running step if there is one."""
        self._playing = False
        held, self._held = self._held, None
        self._gone = True
        if held is None:
            return
        if self._busy:
            held.give_up()
        elif self.run_in == "loop":
            held.close()
        else:
            await self._in_thread("close", held, held.close)

    def _metrics(self) -> dict[str, float]:
        return {"steps": float(self._steps), "invalid_actions": float(self._invalid)}

    def _seed_of(self, seed: int | None, options: dict[str, Any] | None) -> int | None:
        if options is None or "seed" not in options:
            return seed
        own = options["seed"]
        if isinstance(own, bool) or not isinstance(own, int) or own < 0:
            raise ValueError(f"task {options!r}: want a whole number of at least 0 as seed")
        return own

    async def _run(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Run ``function(env, *args)`` in a thread or on the loop; all access to the environment goes through here."""
        if self._busy:
            raise RuntimeError(f"{self.name}.{what} called while another call of this environment runs")
        if self._held is None:
            if self._gone and self._source.is_object:
                raise RuntimeError(
                    f"{self.name} was given as an object, and that was closed or given up; "
                    "an id or a function can be made anew"
                )
            self._held = HeldEnv(self._source.make)
        held = self._held
        if self.run_in == "loop":
            return held.call(function, *args)
        self._busy = True
        try:
            result = await self._in_thread(what, held, held.call, function, *args)
        finally:
            self._busy = False
        if self._held is not held:
            raise RuntimeError(f"{self.name} was closed during a {what}")
        return result

    async def _in_thread(self, what: str, held: HeldEnv, function: Callable[..., T], *args: Any) -> T:
        try:
            return await in_thread(function, *args, timeout=self.step_timeout)
        except (WorkerTimeoutError, asyncio.CancelledError) as error:  # the thread may still be in the call
            held.give_up()
            if self._held is held:
                self._held, self._gone = None, True
            if isinstance(error, asyncio.CancelledError):
                raise
            raise StepTimeoutError(
                f"{self.name}.{what} took over {self.step_timeout:g} s and was given up; the next reset makes it anew"
            ) from error

    def _reset(self, env: Env, seed: int | None, options: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        if self._translator is None:
            self._translator = Translator(env, **self._words)
        observation, info = env.reset(seed=seed, options=options)
        return self._translator.observed(env, observation), info

    def _step(self, env: Env, action: Any) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = env.step(action)
        return self._words_of().observed(env, observation), reward, bool(terminated), bool(truncated), info

    def _words_of(self) -> Translator:
        assert self._translator is not None, "reset makes it"
        return self._translator

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the live environment and its episode."""
        return self.__dict__ | {"_held": None, "_translator": None, "_busy": False, "_playing": False}
