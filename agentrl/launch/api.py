"""The Python interface of runs: ``agentrl.train`` and ``agentrl.evaluate``; the command line calls the same functions.

Guarantees: settings mean what they mean on the command line, and what is wrong with them raises a
:class:`~agentrl.config.errors.UserError` before a process starts; both functions work in scripts and where an event
loop is running (a notebook), and set signal handlers only while they run, in the main thread.
"""

import inspect
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.config.settings import Overrides, Setting, sets, settings_of
from agentrl.core.environment import Environment
from agentrl.core.import_file import being_imported
from agentrl.evaluate.judged import is_unfinished
from agentrl.launch.asked import unfinished
from agentrl.launch.class_path import class_path
from agentrl.launch.evaluated import chooses_model, evaluated, how
from agentrl.launch.model_of_run import model_of_run
from agentrl.launch.results import EvalResult, TrainResult
from agentrl.launch.run import run_recipe


def train(
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    config: str | Path | None = None,
    resume: bool = False,
    console: Console | None = None,
    **sections: Any,
) -> TrainResult:
    """Trains with a recipe, as ``agentrl recipe run`` does.

    Args:
        recipe: A recipe's name, or a path to its YAML file.
        overrides: Settings by dotted key, ``{"trainer.learning_rate": 1e-6}``, or texts ``key=value``.
        config: YAML file merged over the recipe, before the settings.
        resume: Whether to continue the run of this name from its checkpoint.
        console: Console to print to; by default that of the program, and in a notebook none.
        sections: Further settings by section, ``trainer={"learning_rate": 1e-6}, seed=3``; they win over ``overrides``.
            A class stands for its path: ``env=MyEnv``, ``agent={"id": MyAgent, "kwargs": {...}}``.

    Returns:
        Result of the training. A name that was not chosen and is taken gets a number: ``run_dir`` says which.

    Raises:
        UserError: The recipe or a setting cannot be used, or the run cannot start.
        RunFailed: A process of the run failed.
        RunStopped: Ctrl-C or SIGTERM; all processes have ended.
    """
    if not isinstance(recipe, str | Path):
        hint = f"; an environment goes in env={recipe.__name__}" if isinstance(recipe, type) else ""
        raise ConfigError(
            f"{recipe!r:.80}: agentrl.train trains a recipe: want its name, or the path of its file{hint}"
        )
    settings = settings_of(overrides, sections, path_of=partial(class_path, in_process=False), own=_TRAIN)
    loaded = _load(recipe, settings, config)
    if loaded.trainer.type is None:
        raise ConfigError("trainer.type=null: that recipe trains nothing; agentrl.evaluate runs it")
    result = run(loaded, resume=resume, console=console, numbered=not sets(settings, "name"))
    assert isinstance(result, TrainResult)
    return result


def evaluate(
    what: str | Path | type[Environment[Any, Any]],
    overrides: Overrides | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    base_url: str | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    output: str | Path | None = None,
    concurrency: int | None = None,
    resume: bool = False,
    until_ci: float | None = None,
    max_cost: float | None = None,
    max_total_tokens: int | None = None,
    console: Console | None = None,
    **sections: Any,
) -> EvalResult:
    """Evaluates a model in an environment, as ``agentrl eval`` does.

    Args:
        what: A recipe's name or path, an environment's id or path, or an environment class, also one of a notebook.
        overrides: Settings by dotted key, ``{"sampling.max_new_tokens": 64}``, or texts ``key=value``.
        model: Folder or name of the model to load, or the folder of a run, whose model it is; with ``base_url`` the
            name under which that server knows it. A mapping is the recipe's section ``model``.
        base_url: URL of an OpenAI-compatible server, up to and including ``/v1``. Servers of other kinds that are
            running are named by ``inference={"engine": "vllm", "urls": [...]}``. By default a server is started.
        tasks: Number of tasks.
        samples: Episodes per task; over 1, also pass@1 to pass@samples, and sampled at temperature 1.
        output: Folder for the episodes and the result; by default a new one in ``runs/``.
        concurrency: Largest number of episodes, and of requests, at a time; 128 by default.
        resume: Whether to go on with the evaluation in ``output``: what is judged is not asked again. One that was cut
            is gone on with in any case.
        until_ci: Half width of the accuracy's 95% interval at which no further task begins, ``eval.until_ci``.
        max_cost: Cost at which no further episode begins, ``eval.max_cost``.
        max_total_tokens: Number of tokens at which no further episode begins, ``eval.max_total_tokens``.
        console: Console to print to; by default that of the program, and in a notebook none.
        sections: Further settings by section, as in :func:`train`.

    Returns:
        Estimates with intervals, results by task, and all episodes. Those that could not be judged, because a request
        or the environment failed, are counted in ``evaluation.failed``; their reasons are in ``failures``.

    Raises:
        UserError: A name or a setting cannot be used, or the run cannot start.
        RunFailed: A server did not start, or failed, or no further episode could succeed.
        RunStopped: Ctrl-C or SIGTERM; all processes have ended.
    """
    if resume and output is None:
        raise ConfigError("--resume needs --output FOLDER (in Python, resume=True needs output=): the evaluation begun")
    if isinstance(model, Mapping):
        sections, model = {"model": model, **sections}, None
    given = settings_of(overrides, sections, path_of=partial(class_path, in_process=True), own=_EVALUATE)
    recipe, found = evaluated(what, model_is_chosen=model is not None or chooses_model(given))
    if model is not None and base_url is None:
        model = model_of_run(str(model), console)
    found += how(model, base_url, tasks, samples, concurrency, has_recipe=recipe is not None)
    ends = {"until_ci": until_ci, "max_cost": max_cost, "max_total_tokens": max_total_tokens}
    found += [(f"eval.{name}", value) for name, value in ends.items() if value is not None]
    asked = {"what": str(what), "recipe": recipe, "settings": [*found, *given]}
    begun = Path(output) if output is not None else unfinished(asked, console)
    folder = begun or _own_folder(what)
    resume = resume or (begun is not None and is_unfinished(begun))  # a new name may be taken: it gets a number
    found += [("trainer.type", None), ("launch.run_dir", str(folder.parent)), ("name", folder.name)]
    loaded = _load(recipe, [*found, *given])
    if loaded.trainer.type is not None:
        raise ConfigError(f"trainer.type={loaded.trainer.type}: an evaluation trains nothing; agentrl.train does")
    numbered = output is None and not sets(given, "name")
    result = run(loaded, console=console, numbered=numbered, resume=resume, asked=asked)
    assert isinstance(result, EvalResult)
    return result


def _own_folder(what: str | Path | type) -> Path:
    name = what.__name__ if isinstance(what, type) else re.sub(r"\.(py|ya?ml)\b", "", str(what)).rpartition("/")[2]
    short = re.sub(r"\W+", "-", name)
    return Path("runs") / f"eval-{short}-{time.strftime('%Y%m%d-%H%M%S')}"


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "sections")


_TRAIN, _EVALUATE = _arguments(train), _arguments(evaluate)


def _load(recipe: str | Path | None, settings: list[Setting], config: str | Path | None = None) -> Recipe:
    file_in_import = being_imported()
    if file_in_import is not None:
        raise ConfigError(
            f"{file_in_import} is imported by a run, and starts another: put what trains or evaluates in it below "
            '`if __name__ == "__main__":`'
        )
    name, file = (str(one) if one is not None else None for one in (recipe, config))
    return load_recipe(name, settings, file)


def run(
    recipe: Recipe,
    *,
    numbered: bool,
    console: Console | None,
    resume: bool = False,
    asked: Mapping[str, Any] | None = None,
) -> TrainResult | EvalResult:
    """Does what a loaded recipe says: trains, or evaluates with ``trainer.type=null``; see :func:`train`.

    Args:
        recipe: The recipe as loaded.
        numbered: Whether ``-2``, ``-3``, ... is appended to a name that is taken.
        console: Console to print to.
        resume: Whether to continue the run of this name.
        asked: Request for an evaluation, by which the same call finds it again if it was cut.
    """
    where = recipe.launch
    if where.type != "local" or where.node_rank > 0:
        place = f"launch.type={where.type}" if where.type != "local" else f"launch.node_rank={where.node_rank}"
        raise ConfigError(
            f"{place}: that is for the command, agentrl recipe run; in Python a run begins on this machine"
        )
    return run_recipe(recipe, resume=resume, console=console or default_console(), numbered=numbered, asked=asked)


def default_console() -> Console:
    """Returns the program's console; in a notebook one that prints nothing, because the result says it all."""
    console = Console(highlight=False)
    return Console(quiet=True) if console.is_jupyter else console
