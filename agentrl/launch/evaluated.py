"""Decides what an evaluation runs: the recipe of a name or an environment, and the settings that its options mean.

Guarantees: an environment with a recipe is evaluated as it is trained; one without a recipe has the defaults.
"""

from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.load import find_recipe, recipe_names
from agentrl.config.overrides import read_file
from agentrl.config.settings import Setting
from agentrl.config.supervised import SUPERVISED
from agentrl.core.environment import Environment
from agentrl.core.registry import nearest, registered, spec_of

# The recipe's limits suit its small CPU model; a model on an external server needs more. Overrides can change both.
_EXTERNAL: list[Setting] = [("sampling.max_new_tokens", 1024), ("inference.context_length", 8192)]


def evaluated(what: str | Path | type[Environment[Any, Any]]) -> tuple[str | None, list[Setting]]:
    """Finds the recipe that an evaluation starts from.

    An environment's first recipe that learns from episodes goes before those that learn from examples.

    Args:
        what: A recipe's name or path, an environment's id or path, or an environment class.

    Returns:
        The recipe's name or path, ``None`` for an environment without one, and the settings that name the environment.

    Raises:
        ConfigError: ``what`` is neither a known recipe nor an environment.
    """
    if isinstance(what, type):
        return None, [("env.id", path_of(what))]
    name, names = str(what), recipe_names()
    if name in names or name.endswith((".yaml", ".yml")):
        return name, []
    by_env = _recipes_by_environment(names)
    if name in by_env:
        return by_env[name], []
    try:
        full = spec_of("env", name).id
    except LookupError as error:
        known = [*by_env, *names, *registered("env"), *(one.rpartition("-v")[0].lower() for one in registered("env"))]
        raise ConfigError(
            f"no environment or recipe {name!r}{nearest(name, known) or '.'} Environments with a recipe: "
            f"{', '.join(by_env)}. Recipes: {', '.join(names)}"
        ) from error
    for env, recipe in by_env.items():
        try:
            if spec_of("env", env).id == full:
                return recipe, []
        except LookupError:
            continue  # a recipe in ./recipes whose environment is not here
    return None, [("env.id", name)]


def path_of(made: type[Environment[Any, Any]]) -> str:
    """Returns the path by which this process finds an environment class, also one of ``__main__``.

    Raises:
        ConfigError: The class is no environment, or is defined inside a function.
    """
    if not issubclass(made, Environment):
        raise ConfigError(f"{made.__name__} is no environment: want a subclass of agentrl.Environment")
    if "." in made.__qualname__:
        raise ConfigError(f"{made.__qualname__} is defined inside another object: define the class at module level")
    return f"{made.__module__}:{made.__name__}"


def how(
    model: str | Path | None, base_url: str | None, tasks: int | None, samples: int | None, *, has_recipe: bool
) -> list[Setting]:
    """Returns the settings that an evaluation's options mean.

    Raises:
        ConfigError: A server is named without the model's name, or nothing names a model.
    """
    found: list[Setting] = []
    if base_url is not None:
        if model is None:
            raise ConfigError(
                "--base-url needs --model NAME (in Python, base_url needs model): the name under which that server "
                "knows the model"
            )
        found += [("inference.engine", "openai"), ("inference.urls", [base_url]), *_EXTERNAL]
        found.append(("inference.model", str(model)))
    if model is not None and (base_url is None or not has_recipe):
        found.append(("model.name", str(model)))
    if tasks is not None:
        found.append(("eval.tasks", tasks))
    if samples is not None:
        found.append(("eval.samples", samples))
        if samples > 1:
            found.append(("sampling.eval_temperature", 1.0))  # greedy samples of one task would all be equal
    return found


def _recipes_by_environment(names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for lines in (False, True):  # recipes that learn from examples last: their settings suit longer texts
        for recipe in names:
            content = read_file(find_recipe(recipe))
            env, trainer = content.get("env"), content.get("trainer")
            learns_lines = isinstance(trainer, dict) and trainer.get("type") in SUPERVISED
            if isinstance(env, dict) and learns_lines == lines:
                found.setdefault(str(env.get("id")), recipe)
    return found
