"""Refuses a model that cannot be trained, while the inference servers load: ``python -m agentrl.train.model_check``.

Guarantees: no weights are read. A small random model with the config of the recipe's model goes through the trial of a
first update on one CPU rank, as the trainer's own model does later, and is refused with the same message. What a small
model cannot decide is not refused here: the trainer still tries the model itself.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging

from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run
from agentrl.config.recipe import Recipe
from agentrl.host.entry import begin, refuse, run_arguments
from agentrl.models.small_model import fitting_model, small_configs
from agentrl.train.__main__ import make_critic, make_policy
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import load_config


def check_model(recipe: Recipe, model_path: Path) -> str | None:
    """Tries a small model of a model's config, in a process group of one rank.

    Args:
        recipe: Resolved recipe.
        model_path: Folder with the model's ``config.json``.

    Returns:
        Why nothing was decided; ``None`` after a trial.

    Raises:
        ModelRefused: The model cannot be trained.
    """
    config = load_config(model_path, trust=recipe.model.trust_remote_code, weights=False)
    model = small_model(config)
    if model is None:
        return f"no small model can be made of {type(config).__name__}"
    with tempfile.TemporaryDirectory(prefix="agentrl-model-check-") as folder:
        model.save_pretrained(folder)
        del model
        _try(recipe, Path(folder))
    return None


def small_model(config: Any) -> Any | None:
    """Makes the smallest model of a config that computes a forward and a backward pass; ``None`` if none does."""
    return next(filter(None, map(fitting_model, small_configs(config))), None)


def _try(recipe: Recipe, folder: Path) -> None:
    """Makes policy and critic as a trainer on a CPU does; compilation, which takes minutes there, is left out."""
    trainer = recipe.trainer.model_copy(update={"compile": False, "cpu_offload": False})
    recipe = recipe.model_copy(update={"trainer": trainer})
    device = torch.device("cpu")
    mesh = RankMesh.of_world(device)
    make_policy(recipe, folder, mesh, device)
    if trainer.advantage == "gae":
        make_critic(recipe, folder, mesh, device)


def main(argv: list[str] | None = None) -> int:
    """Checks the model of a run; the exit code says whether it is refused."""
    args = run_arguments("agentrl.train.model_check").parse_args(argv)
    begin()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="agentrl-model-check-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            undecided = check_model(recipe_of_run(args.run_dir), args.model)
        except UserError as error:
            return refuse(error)
        finally:
            dist.destroy_process_group()
    print(f"the trainer alone can tell: {undecided}" if undecided else "the model can be trained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
