"""Settings that are allowed and hardly ever meant: shown once, before a run starts.

Guarantees: pure functions of the recipe; each hint names the keys and what to set.
"""

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED, evaluates


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
    return found
