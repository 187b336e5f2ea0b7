"""The same step by agentrl: episodes through columns, batch and learner, as the trainer takes them.

``python -m tests.references.learning FOLDER STORE RANK RANKS`` takes the steps of all presets, and of some variants, on
one of several ranks; rank 0 writes them to ``FOLDER/NAME.safetensors`` and ``FOLDER/NAME.json``.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl.config.mesh import mesh_shape
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode
from agentrl.train.__main__ import make_critic, make_policy
from agentrl.train.critic import ValueLearner
from agentrl.train.learner import PolicyLearner
from agentrl.train.mesh import RankMesh
from agentrl.train.trainer import Trainer
from agentrl.weights.gather import full_tensor
from tests.references.cases import TEMPERATURE, VERSION
from tests.references.step import Setting

CPU = torch.device("cpu")
RATE, LONGEST = 0.1, 30


@dataclass(frozen=True)
class Learned:
    """The change of every parameter by a step, and its metrics."""

    policy: dict[str, Tensor]
    critic: dict[str, Tensor]
    metrics: dict[str, float]


def setting(folder: Path, *, scale: float = 1.0, bias: float = 0.0) -> Setting:
    """Returns what both sides take beside the algorithm: ``folder`` holds the models ``policy`` and ``reference``."""
    head = torch.randn(33, generator=torch.Generator().manual_seed(1)) * 0.2
    return Setting(
        folder / "policy", folder / "reference", head, VERSION, RATE, TEMPERATURE, LONGEST, scale=scale, bias=bias
    )


def recipe_of(given: Setting, choices: dict[str, Any]) -> Recipe:
    trainer = {
        "learning_rate": given.rate, "max_grad_norm": 1e9, "dtype": "float32", "tokens_per_microbatch": 150,
        "logprob_chunk": 16, **choices,
    }  # fmt: skip
    trainer["metric_share"] = 1.0  # metrics of all tokens
    if choices.get("preset") == "ppo":
        trainer["critic_learning_rate"] = given.rate
    taught = choices.get("preset") == "distill" or "distill_coef" in choices
    return Recipe.model_validate(
        {
            "model": {"name": str(given.policy)},
            "env": {"id": "unused"},
            "sampling": {"temperature": given.temperature, "max_new_tokens": given.longest},
            "reward": {"scale": given.scale, "bias": given.bias},
            "teacher": {"model": "unused"} if taught else {},
            "trainer": trainer,
        }
    )


def learned(episodes: Sequence[Episode], choices: dict[str, Any], given: Setting, folder: Path) -> Learned:
    """Takes one step with plain gradient descent instead of AdamW; a collective, with the episodes on rank 0."""
    recipe = recipe_of(given, choices)
    return stepped(episodes, recipe, engine_of(recipe, given), given, folder)


def stepped(
    episodes: Sequence[Episode], recipe: Recipe, engine: PolicyLearner, given: Setting, folder: Path
) -> Learned:
    """Takes one step of an engine; a collective."""
    modules = {"policy": engine.policy.model} | ({"critic": engine.critic.critic} if engine.critic else {})
    before = {name: _weights(module) for name, module in modules.items()}
    trainer = Trainer(recipe, given.policy, folder, engine, None, None)  # type: ignore[arg-type]
    trainer.step = given.version
    columns = Columns.of(episodes) if dist.get_rank() == 0 else None
    metrics = trainer.update(columns, given.rate)
    change = {
        name: {key: weight - before[name][key] for key, weight in _weights(module).items()}
        for name, module in modules.items()
    }
    return Learned(change["policy"], _named(change.get("critic", {})), metrics)


def engine_of(recipe: Recipe, given: Setting) -> PolicyLearner:
    """Makes an engine that descends its plain gradients."""
    config = recipe.trainer
    ranks = RankMesh.of_world(CPU, mesh_shape(config, dist.get_world_size()))
    reference = make_policy(recipe, given.reference, ranks, CPU).requires_grad_(False) if config.kl_coef else None
    critic: ValueLearner | None = None
    if config.advantage == "gae":
        critic = make_critic(recipe, given.policy, ranks, CPU)
        _fill(critic.critic.head.weight, given.head[None, :-1])
        _fill(critic.critic.head.bias, given.head[-1:])
        critic.optimizer = _descent(critic.critic)
    engine = PolicyLearner(make_policy(recipe, given.policy, ranks, CPU), reference, config, CPU, critic, ranks)
    engine.optimizer = _descent(engine.policy)
    return engine


@torch.no_grad()
def _fill(weight: Tensor, full: Tensor) -> None:
    weight.copy_(
        distribute_tensor(full, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else full
    )


def _descent(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=RATE)


def _weights(module: Any) -> dict[str, Tensor]:
    return {name: full_tensor(weight).detach().double().clone() for name, weight in module.named_parameters()}


def _named(critic: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames a critic's weights: the head with its bias behind it is one, as in the reference."""
    if not critic:
        return {}
    head = torch.cat([critic.pop("head.weight")[0], critic.pop("head.bias")])
    return {"head": head, **critic}


def main(folder: str, store: str, rank: str, ranks: str) -> None:
    from agentrl.config.declarations import preset_names
    from tests.references.cases import CASES, episodes_of
    from tests.references.variants import ON_RANKS, VARIANTS

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    given = setting(Path(folder))
    presets = {name: {"preset": name} for name in preset_names()}
    for name, choices in (presets | {name: VARIANTS[name][0] for name in ON_RANKS}).items():
        episodes = episodes_of(tuple(CASES), given.policy) if int(rank) == 0 else []
        found = learned(episodes, choices, given, Path(folder))
        if int(rank) == 0:
            tensors = {f"{kind}/{key}": w for kind in ("policy", "critic") for key, w in getattr(found, kind).items()}
            save_file(tensors, Path(folder) / f"{name}.safetensors")
            (Path(folder) / f"{name}.json").write_text(json.dumps(found.metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
