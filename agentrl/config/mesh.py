"""Recipe keys that arrange the trainer's ranks in a device mesh, and their contradictions with other settings.

Guarantees: a mesh that the ranks do not fill, or that a setting does not work with, is refused before anything starts,
with the keys named; a model whose heads or experts do not divide is refused with its numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from agentrl.config.errors import ConfigError
from agentrl.config.section import Positive, Section

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe


class MeshConfig(Section):
    """The device mesh: replicas x FSDP shards x context x tensor; the shards are what the others leave."""

    replicas: Positive = Field(
        default=1, description="Copies of the sharded model (HSDP), e.g. one on each machine; gradients are averaged."
    )
    context_parallel: Positive = Field(
        default=1, description="Ranks that share the tokens of a micro-batch; for contexts that one rank cannot hold."
    )
    tensor_parallel: Positive = Field(
        default=1, description="Ranks that share each layer's matrices, by transformers' plan of the model."
    )
    expert_parallel: Positive = Field(
        default=1, description="Ranks that share the experts of a mixture of experts, a multiple of tensor_parallel."
    )
    reshard_after_forward: Literal["auto"] | bool = Field(
        default="auto",
        description="Free a layer's gathered weights after its use (ZeRO-3), at the price of gathering them again. "
        "auto: where the whole weights and gradients do not fit beside the shards.",
    )


SIZES = ("replicas", "context_parallel", "tensor_parallel", "expert_parallel")
ONE_RANK = dict.fromkeys(SIZES, 1)
"""The keys of a trainer that runs on one rank, whatever mesh its recipe has."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of a device mesh.

    Attributes:
        replicas: Copies of the sharded model.
        shards: Ranks with other rows that share a copy's parameters.
        context: Ranks that share the tokens of a micro-batch; they also share a copy's parameters.
        tensor: Ranks that share each matrix.
        expert: Ranks that share the experts.
    """

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards * self.context * self.tensor

    @property
    def data(self) -> int:
        """Number of groups of ranks that get rows of their own."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        sizes = {"replicas": self.replicas, "shards": self.shards, "context": self.context, "tensor": self.tensor}
        text = " x ".join(f"{count} {name}" for name, count in sizes.items() if count > 1) or "1 rank"
        return f"{text}, experts over {self.expert}" if self.expert > 1 else text


def mesh_shape(config: MeshConfig, ranks: int) -> MeshShape:
    """Returns the mesh of some ranks.

    Raises:
        ValueError: The ranks do not fill the mesh, or experts do not divide over it.
    """
    asked = {name: getattr(config, name) for name in SIZES[:3]}
    least = config.replicas * config.context_parallel * config.tensor_parallel
    if ranks % least:
        named = " * ".join(f"trainer.{name}={count}" for name, count in asked.items() if count > 1)
        raise ValueError(f"{named} = {least} does not divide the {ranks} ranks of trainer.nproc * trainer.nodes")
    shape = MeshShape(
        config.replicas, ranks // least, config.context_parallel, config.tensor_parallel, config.expert_parallel
    )
    if shape.expert > 1 and (shape.expert % shape.tensor or (shape.size // shape.replicas) % shape.expert):
        raise ValueError(
            f"trainer.expert_parallel={shape.expert} must be a multiple of trainer.tensor_parallel={shape.tensor} and "
            f"divide the {shape.size // shape.replicas} ranks of a replica"
        )
    return shape


def mesh_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions between the mesh and other settings."""
    trainer = recipe.trainer
    try:
        shape = mesh_shape(trainer, trainer.ranks)
    except ValueError as error:
        yield str(error)
        return
    if trainer.replay_routing:
        for name in ("context_parallel", "tensor_parallel", "expert_parallel"):
            if getattr(trainer, name) > 1:
                yield f"trainer.replay_routing=true does not work with trainer.{name}={getattr(trainer, name)}"
        if trainer.compile:
            yield "trainer.replay_routing=true does not work with trainer.compile=true: routers are changed as they run"
    if shape.context > 1:
        key = f"trainer.context_parallel={shape.context}"
        if trainer.attention == "padded":
            yield f"{key} shares the tokens of packed rows: trainer.attention=padded has none"
        if trainer.compile and recipe.launch.device == "cpu":
            yield f"{key} needs packed rows, which trainer.compile=true does not have on a CPU"
    for name, count in (("tensor", shape.tensor), ("expert", shape.expert)):
        if count == 1:
            continue
        for key in ("compile", "cpu_offload"):
            if getattr(trainer, key):
                yield f"trainer.{name}_parallel={count} does not work with trainer.{key}=true"
        if trainer.lora_rank is not None:
            yield f"trainer.{name}_parallel={count} does not work with trainer.lora_rank: an adapter is not split"


def check_mesh(config: MeshConfig, model: Mapping[str, Any]) -> None:
    """Refuses a model that cannot be split as asked.

    Raises:
        ConfigError: It cannot; the message has its numbers.
    """
    for problem in model_contradictions(config, model):
        raise ConfigError(problem)


def model_contradictions(config: MeshConfig, model: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a model cannot be split as asked.

    Args:
        config: The mesh's keys.
        model: The model's ``config.json``.
    """
    model = model.get("text_config") or model
    tensor, expert = config.tensor_parallel, config.expert_parallel
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = model.get(name)
        if count is not None and count % tensor:
            yield f"trainer.tensor_parallel={tensor} does not divide the model's {name}={count}"
    if expert > 1:
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((model[name] for name in names if model.get(name)), None)
        if experts is None:
            yield f"trainer.expert_parallel={expert}: the model has no experts"
        elif experts % expert:
            yield f"trainer.expert_parallel={expert} does not divide the model's {experts} experts"
