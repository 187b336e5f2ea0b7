"""Finds the recipe whose settings an evaluation of an environment uses.

Guarantees: an environment is the same one whichever way it is named (id, name in ``./envs``, path, module); nothing of
it is imported.
"""

from pathlib import Path

from agentrl.config.errors import ConfigError
from agentrl.config.load import find_recipe, recipe_names
from agentrl.config.overrides import read_file
from agentrl.config.supervised import SUPERVISED
from agentrl.core.registry import nearest, registered, spec_of


def recipe_of(name: str) -> str | None:
    """Returns the recipe of a name: a recipe's name or path, or an environment in any of the ways to name one.

    An environment's first recipe that learns from episodes goes before those that learn from examples.

    Returns:
        Name or path of the recipe; ``None`` for an environment that no recipe trains on.

    Raises:
        ConfigError: ``name`` is neither a recipe nor an environment.
    """
    names = recipe_names()
    if name in names or name.endswith((".yaml", ".yml")):
        return name
    by_env = _recipes_by_env(names)
    try:
        return by_env.get(_identity(name))
    except LookupError as error:
        if ":" in name or name.endswith(".py") or Path(f"{name}.py").is_file():
            raise ConfigError(str(error.args[0])) from error
        known = [*names, *(id.rpartition("-v")[0].lower() for id in registered("env"))]
        hint = nearest(name, known) or "."
        text = f"no environment or recipe {name!r}{hint} {error.args[0]}. Recipes: {', '.join(names)}"
        raise ConfigError(text) from error


def _recipes_by_env(names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for examples in (False, True):  # recipes that learn from examples last: their settings suit longer texts
        for recipe in names:
            content = read_file(find_recipe(recipe))
            env, trainer = content.get("env"), content.get("trainer")
            learns_examples = isinstance(trainer, dict) and trainer.get("type") in SUPERVISED
            if isinstance(env, dict) and learns_examples == examples:
                try:
                    found.setdefault(_identity(str(env.get("id"))), recipe)
                except LookupError:
                    continue  # the recipe of an environment that is not here
    return found


def _identity(name: str) -> str:
    """Returns a text that is the same for all ways to name an environment.

    Raises:
        LookupError: There is no such environment.
    """
    module, _, attribute = spec_of("env", name).entry_point.rpartition(":")
    return f"{Path(module).resolve() if module.endswith('.py') else module}:{attribute}"
