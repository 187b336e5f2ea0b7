"""Settings that are allowed and hardly ever meant: shown once, before a run starts.

Guarantees: pure functions of the recipe; each hint names the keys and what to set.
"""

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED, evaluates

_CPUS = ("--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive", "--mincpus", "--sockets-per-node")


def hints(recipe: Recipe) -> list[str]:
    """Returns one sentence for each setting of a recipe that probably does not do what its user wants."""
    found: list[str] = []
    evaluated = recipe.trainer.type not in SUPERVISED or evaluates(recipe)
    if evaluated and recipe.eval.samples > 1 and recipe.sampling.eval_temperature == 0:
        found.append(
            f"eval.samples={recipe.eval.samples} with sampling.eval_temperature=0 repeats one greedy answer of each "
            "task, so pass@k says no more than pass@1: set sampling.eval_temperature=1.0, or eval.samples=1"
        )
    if recipe.rollout.workers and recipe.trainer.type is None:
        found.append(
            f"rollout.workers={recipe.rollout.workers} does nothing with trainer.type=null: an evaluation alone runs "
            "its episodes in its own process"
        )
    trains = recipe.trainer.type is not None and recipe.trainer.type not in SUPERVISED
    if trains and recipe.eval.on_push == "reserve" and (len(recipe.inference.urls) or recipe.inference.servers) == 1:
        found.append(
            "eval.on_push=reserve with a single server keeps none for the evaluation, which goes on with new weights: "
            "set inference.servers=2, or eval.on_push=wait for evaluations of one version"
        )
    for key in _without_cpus(recipe):
        found.append(
            f"{key} says nothing of CPUs, and Slurm then gives all processes of a node one, unless the cluster does "
            "otherwise: add --cpus-per-task=N, --cpus-per-gpu=N or --exclusive"
        )
    return found


def _without_cpus(recipe: Recipe) -> list[str]:
    """Returns the keys of a job's options that ask for no number of CPUs."""
    if recipe.launch.type != "slurm":
        return []
    slurm = recipe.launch.slurm
    options = {"args": slurm.args, "server_args": slurm.server_args, "worker_args": slurm.worker_args}
    asked = {name: any(one.startswith(_CPUS) for one in given) for name, given in options.items()}
    return [f"launch.slurm.{name}" for name in options if (options[name] or name == "args") and not asked[name]]
