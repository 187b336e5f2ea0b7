"""Makes a ``gymnasium.Env`` from an id, a function, or the object itself.

Guarantees: an unknown id and wrong arguments raise before an environment is made.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agentrl.envkit.wrappers.held_env import Env

_MAKE_ONLY = ("max_episode_steps", "disable_env_checker")  # arguments of gymnasium.make itself


class EnvSource:
    """Makes Gymnasium environments.

    Args:
        source: Gymnasium id, function that makes an environment, or environment.
        kwargs: Arguments of ``gymnasium.make``, or of the function.
        draw: Whether to set ``render_mode="ansi"`` if the environment of an id supports it.

    Attributes:
        name: Name of the environment in error messages.
        is_object: Whether the source is an environment, which cannot be made again.

    Raises:
        LookupError: Gymnasium does not know the id.
        TypeError: ``source`` has a wrong type, or does not take ``kwargs``.
    """

    def __init__(self, source: str | Env | Callable[..., Env], kwargs: dict[str, Any], *, draw: bool) -> None:
        self._source = source
        self._kwargs = kwargs
        self._draw = draw
        self.is_object = isinstance(source, gymnasium.Env)
        self.name = self._checked()

    def make(self) -> Env:
        """Makes a new environment, or returns the given one.

        Raises:
            TypeError: The function did not return a ``gymnasium.Env``.
        """
        source = self._source
        if isinstance(source, gymnasium.Env):
            return source
        if not isinstance(source, str):
            made = source(**self._kwargs)
            if not isinstance(made, gymnasium.Env):
                raise TypeError(f"{self.name} made a {type(made).__name__}, which is no gymnasium.Env")
            return made
        spec, kwargs = find_spec(source), dict(self._kwargs)
        modes = getattr(_creator(spec), "metadata", {}).get("render_modes", ())
        if self._draw and "ansi" in modes and "render_mode" not in kwargs | spec.kwargs:
            kwargs["render_mode"] = "ansi"
        return gymnasium.make(spec, **kwargs)

    def _checked(self) -> str:
        """Checks source and arguments; returns the environment's name."""
        source = self._source
        if isinstance(source, gymnasium.Env):
            if self._kwargs:
                raise TypeError(f"GymnasiumEnvironment does not take {', '.join(self._kwargs)} beside an environment")
            return source.spec.id if source.spec is not None else type(source.unwrapped).__name__
        if isinstance(source, str):
            spec = find_spec(source)
            given = {name: value for name, value in self._kwargs.items() if name not in _MAKE_ONLY}
            _check_arguments(_creator(spec), spec.kwargs | given, spec.id)
            return spec.id
        if not callable(source):
            raise TypeError(f"GymnasiumEnvironment wants an id, an environment or a function, got {source!r}")
        name = getattr(source, "__name__", type(source).__name__)
        _check_arguments(source, self._kwargs, name)
        return name


@dataclass(frozen=True)
class SeedTasks(Sequence[Mapping[str, Any]]):
    """Sequence of tasks ``{"seed": n}``.

    Attributes:
        start: First seed.
        size: Number of tasks.
    """

    start: int
    size: int

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        seeds = range(self.start, self.start + self.size)[index]
        return [{"seed": seed} for seed in seeds] if isinstance(seeds, range) else {"seed": seeds}

    def __len__(self) -> int:
        return self.size


def find_spec(id: str) -> EnvSpec:
    """Returns Gymnasium's entry for an id; first imports the module named before a colon.

    Raises:
        LookupError: Gymnasium does not know the id.
    """
    module, _, name = id.rpartition(":")
    if module:
        importlib.import_module(module)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise LookupError(f"gymnasium has no environment {id!r}: {error}") from error


def _creator(spec: EnvSpec) -> Any:
    return load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point


def _check_arguments(function: Any, kwargs: dict[str, Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have no signature
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise TypeError(f"{name} with arguments {kwargs}: {error}") from error
