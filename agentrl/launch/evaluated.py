"""Decides what an evaluation runs: the recipe of a name or an environment, and the settings that its options mean.

Guarantees: an environment with a recipe is evaluated as it is trained; one without a recipe has the recipe's
defaults and the same model on every machine.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.config.env_recipe import recipe_of
from agentrl.config.errors import ConfigError
from agentrl.config.settings import Setting
from agentrl.core.environment import Environment
from agentrl.launch.class_path import class_path

# Of an environment without a recipe; small enough for any machine. The model's own template knows no tools.
DEFAULT_MODEL: list[Setting] = [
    ("model.name", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("model.chat_template", "chatml_tools"),
]

# The recipe's limits suit its small CPU model; a model on an external server needs more. Overrides can change both.
_EXTERNAL: list[Setting] = [("sampling.max_new_tokens", 1024), ("inference.context_length", 8192)]


def evaluated(
    what: str | Path | type[Environment[Any, Any]], *, model_is_chosen: bool = True
) -> tuple[str | None, list[Setting]]:
    """Finds the recipe that an evaluation starts from.

    Args:
        what: A recipe's name or path, an environment in any of the ways to name one, or an environment class.
        model_is_chosen: Whether the user chose a model; if not, an environment without a recipe gets
            :data:`DEFAULT_MODEL`.

    Returns:
        The recipe's name or path, ``None`` for an environment without one, and the settings that such an environment
        needs.

    Raises:
        ConfigError: ``what`` is neither a known recipe nor an environment.
    """
    name = _name_of(what)
    recipe = recipe_of(name)
    if recipe is not None:
        return recipe, []
    return None, [("env.id", name), *([] if model_is_chosen else DEFAULT_MODEL)]


def chooses_model(settings: Sequence[Setting]) -> bool:
    """Whether one of the settings is of the model's name, or of the whole section ``model``."""
    keys = [one.partition("=")[0].strip() if isinstance(one, str) else one[0] for one in settings]
    return "model" in keys or "model.name" in keys


def _name_of(what: Any) -> str:
    """Returns the name or path of what is evaluated; of a class the one by which this process finds it."""
    if isinstance(what, type):
        if not issubclass(what, Environment):
            raise ConfigError(f"{what.__name__} is no environment: want a subclass of agentrl.Environment")
        return class_path(what, in_process=True)
    if isinstance(what, Environment):
        raise ConfigError(
            f"an object of class {type(what).__name__}: give the class itself; its arguments are env.kwargs"
        )
    if not isinstance(what, str | Path):
        raise ConfigError(f"{what!r:.80}: want a recipe, an environment's id or path, or an environment class")
    return str(what)


def how(
    model: str | Path | None = None,
    base_url: str | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    concurrency: int | None = None,
    *,
    has_recipe: bool,
) -> list[Setting]:
    """Returns the settings that an evaluation's options mean.

    Raises:
        ConfigError: A server is named without the model's name, or its URL is none.
    """
    found: list[Setting] = []
    if base_url is not None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base_url}: want a URL, such as http://{base_url}")
        if model is None:
            raise ConfigError(
                "--base-url needs --model NAME (in Python, base_url needs model): the name under which that server "
                "knows the model"
            )
        found += [("inference.engine", "openai"), ("inference.urls", [base_url]), *_EXTERNAL]
        found.append(("inference.model", str(model)))
    if model is not None and (base_url is None or not has_recipe):
        found.append(("model.name", str(model)))
    if concurrency is not None:
        found.append(("rollout.max_concurrent", concurrency))
    if tasks is not None:
        found.append(("eval.tasks", tasks))
    if samples is not None:
        found.append(("eval.samples", samples))
        if samples > 1:
            found.append(("sampling.eval_temperature", 1.0))  # greedy samples of one task would all be equal
    return found
