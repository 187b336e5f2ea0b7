"""``agentrl env check --model``: a few episodes with a model, before a run is started on them.

Guarantees: nothing is trained, and nothing is written outside a temporary folder; episodes are sampled at the
recipe's training temperature, because greedy answers to one task are all equal.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.errors import ConfigError, UserError
from agentrl.envkit.check.first_look import FirstLook

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.config.recipe import Recipe

TASKS, SAMPLES = 4, 8


def look(env: str, kwargs: dict[str, Any], model: str, overrides: list[str], console: "Console") -> FirstLook:
    """Runs ``TASKS`` groups of ``SAMPLES`` episodes with a model.

    Args:
        env: The environment, as given to ``env check``.
        kwargs: Arguments of the environment.
        model: Name or folder of the model.
        overrides: Settings such as ``model.chat_template=chatml_tools``, over those of the environment's recipe.
        console: Receives the evaluation's output.

    Raises:
        UserError: The evaluation could not run.
    """
    from agentrl.launch.evaluation import EPISODES, evaluate_recipe
    from agentrl.launch.supervisor import ChildFailed

    with tempfile.TemporaryDirectory(prefix="agentrl-look-") as folder:
        recipe = look_recipe(env, kwargs, model, overrides, Path(folder))
        (Path(folder) / recipe.name).mkdir(exist_ok=True)
        try:
            evaluate_recipe(recipe, Path(folder) / recipe.name, console, stays=False)
        except ChildFailed as error:
            raise UserError(f"no first look with {model}: {error}") from error
        file = Path(folder) / recipe.name / EPISODES
        if not file.is_file():
            raise UserError(f"no first look with {model}: no episode could be run; see the lines above")
        return read_look(file, recipe.rollout.solved_reward)


def look_recipe(env: str, kwargs: dict[str, Any], model: str, overrides: list[str], folder: Path) -> "Recipe":
    """Loads the first recipe that names the environment, or a minimal one, set to a small evaluation."""
    from agentrl.config.load import load_recipe
    from agentrl.config.yaml12 import write_yaml

    name = recipe_for(env)
    if name is None:
        name = str(folder / "look.yaml")
        Path(name).write_text(f"description: A first look.\nenv: {{id: {write_yaml(env).strip()}}}\n")
    settings = [
        "trainer.type=null", "name=look", f"launch.run_dir={folder}", f"model.name={model}", f"env.id={env}",
        f"eval.tasks={TASKS}", f"eval.samples={SAMPLES}", "logging.episodes=true",
        *(f"env.kwargs.{key}={write_yaml(value).strip()}" for key, value in kwargs.items()),
        *overrides,
    ]  # fmt: skip
    temperature = load_recipe(name, settings).sampling.temperature
    return load_recipe(name, [*settings, f"sampling.eval_temperature={temperature}"])


def recipe_for(env: str) -> str | None:
    """Returns the first recipe whose environment is the class that ``env`` names and that learns from episodes."""
    from agentrl.config.load import find_recipe, recipe_names
    from agentrl.config.overrides import read_file
    from agentrl.config.supervised import SUPERVISED
    from agentrl.core.registry import spec_of

    wanted = _place(spec_of("env", env).entry_point)
    for name in recipe_names():
        content = read_file(find_recipe(name))
        given, trainer = content.get("env"), content.get("trainer")
        if isinstance(trainer, dict) and trainer.get("type") in SUPERVISED:
            continue
        try:
            if isinstance(given, dict) and _place(spec_of("env", str(given.get("id"))).entry_point) == wanted:
                return name
        except (LookupError, ConfigError):
            continue  # a recipe of an environment that is not here
    return None


def _place(entry_point: str) -> str:
    """Returns an entry point with the absolute path of its file, if it has one."""
    home, _, name = entry_point.rpartition(":")
    return f"{Path(home).resolve()}:{name}" if home.endswith(".py") else entry_point


def read_look(file: Path, solved_reward: float) -> FirstLook:
    """Reads the groups of an evaluation's episodes.

    Args:
        file: ``eval-episodes.jsonl``.
        solved_reward: Reward from which an episode without an accuracy counts as solved.
    """
    from agentrl.core.ending import SUCCESS
    from agentrl.core.episode import FAILURES
    from agentrl.observe.examine_run import lines

    groups: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    failed = 0
    for episode in lines(file):
        reward, metrics = episode.get("reward"), episode.get("metrics") or {}
        if reward is None or episode.get("stop_reason") in FAILURES:
            failed += 1
            continue
        right = metrics[SUCCESS] >= 1 if SUCCESS in metrics else reward >= solved_reward
        groups[episode["group_id"]].append((reward, right))
    return FirstLook(
        [[reward for reward, _ in group] for group in groups.values()],
        [[right for _, right in group] for group in groups.values()],
        failed,
    )


def show_look(found: FirstLook, model: str, console: "Console") -> None:
    """Print what was seen and what to do about it."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Text(f"first look with {model}: {found.summary()}"))
    for problem, remedy in found.problems():
        console.print(Text.assemble(("WARNING", "bold yellow"), f"  {problem}"))
        console.print(Padding(Text(f"mend: {remedy}"), (0, 0, 0, 4)))


def as_json(found: FirstLook) -> dict[str, Any]:
    """Returns a first look as JSON data."""
    return {
        "rewards": found.rewards,
        "solve_rate": found.solve_rate,
        "groups_with_spread": found.with_spread,
        "failed": found.failed,
        "problems": [{"message": message, "mend": remedy} for message, remedy in found.problems()],
    }
