"""``python -m tests.train.shared_experts FOLDER EXPERT REPLICAS``: what four ranks that share experts count of a model.

Prints one line of JSON: the parameters that the first rank computes with, and those that it keeps.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from agentrl.train import __main__ as trainer
from agentrl.train import free_layers
from tests.train.meshes import build_models, engine_of, recipe_of
from tests.train.ranks import on_ranks

RANKS = 4


def main(folder: Path, expert: int, replicas: int) -> None:
    build_models(folder)
    keys = {"expert_parallel": expert, "replicas": replicas, "reshard_after_forward": "auto"}
    recipe = recipe_of(folder / "moe", RANKS, keys)

    def load(rank: int) -> None:
        def choose(config: Any, parameters: Iterable[Tensor], mesh: Any, device: Any) -> Any:
            known = list(parameters)
            if rank == 0:
                print(json.dumps(free_layers.counted(known, mesh.shape.shards * mesh.shape.context)), flush=True)
            return free_layers.choose(config, known, mesh, device)

        trainer.choose = choose
        engine_of(recipe, folder / "moe")

    on_ranks(RANKS, load)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
