"""The recipe that a scheduler's launchers run on their machines, and the folder of its run."""

from pathlib import Path

from agentrl.config.recipe import LaunchConfig, Recipe

_SCHEDULED = (
    "type",
    "slurm",
    "ray_address",
    "ray_resources",
    "ray_server_resources",
    "ray_worker_resources",
    "restarts",
)  # keys of the scheduler alone


def recipe_of_machine(recipe: Recipe) -> Recipe:
    """Returns a recipe for the launchers of its machines; each gets its number and the head's address as settings."""
    plain = LaunchConfig()
    changes = {name: getattr(plain, name) for name in _SCHEDULED} | {
        "run_dir": str(Path(recipe.launch.run_dir).absolute())
    }
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update=changes)})


def run_folder(recipe: Recipe) -> Path:
    """Returns the run's folder, as an absolute path."""
    return (Path(recipe.launch.run_dir) / recipe.name).absolute()
