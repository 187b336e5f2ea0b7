"""The trainer's device mesh as a plan sees it: replicas x shards x context x tensor, from the recipe's own keys.

Guarantees: pure; the product of the four is the number of ranks; with ``trainer.reshard_after_forward=auto`` layers are
freed where the trainer would free them (:mod:`agentrl.train.free_layers`, which a test compares).
"""

from dataclasses import dataclass, replace

from agentrl.config.errors import ConfigError
from agentrl.config.mesh import MeshConfig, mesh_shape
from agentrl.config.recipe import TrainerConfig
from agentrl.models.sizes import Decoder

KEPT_SHARE = 0.5  # of a rank's memory that kept weights, gradients and shards may take before layers are freed
STATE = 16  # bytes of a parameter's shard: itself, its gradient, two moments, all float32


@dataclass(frozen=True)
class Mesh:
    """Shares of the trainer's ranks in the work.

    Attributes:
        replicas: Groups of ranks that each hold all shards (HSDP); each takes other rows of the batch.
        shards: Ranks over which parameters, gradients and moments are sharded (FSDP); each takes other rows too.
        context: Ranks that share a row's tokens.
        tensor: Ranks that share each matrix.
        reshard: Whether a layer's gathered parameters are freed after each use (ZeRO-3), and gradients are reduced
            after each micro-batch.
        expert: Ranks that share the experts; they are ranks of the others.
    """

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    reshard: bool = False
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards * self.context * self.tensor

    @property
    def rows(self) -> int:
        """Number of ranks, or groups of ranks, that compute different rows."""
        return self.replicas * self.shards

    @property
    def sharing(self) -> int:
        """Number of ranks that FSDP shards over; context ranks are among them."""
        return self.shards * self.context

    @property
    def owners(self) -> int:
        """Number of ranks that the state of a layer's parameter is divided among."""
        return self.sharing * self.tensor

    def whole(self, decoder: Decoder) -> float:
        """Returns the parameters that a rank computes with: its part of each matrix, and its experts.

        Embedding and output head are not split: each tensor rank computes with the whole of them.
        """
        return decoder.embeddings + self.whole_layers(decoder) + self.whole_experts(decoder)

    def whole_layers(self, decoder: Decoder) -> float:
        """Returns those of :meth:`whole` that are a layer's, without experts that ranks share."""
        shared = decoder.expert_parameters if self.expert > 1 else 0
        return (decoder.parameters - decoder.embeddings - shared) / self.tensor

    def whole_experts(self, decoder: Decoder) -> float:
        """Returns those of :meth:`whole` that are experts which ranks share; 0 where they are split as matrices."""
        return decoder.expert_parameters / self.expert if self.expert > 1 else 0.0

    def own(self, decoder: Decoder) -> float:
        """Returns the parameters whose gradients and moments a rank keeps."""
        layers = decoder.parameters - decoder.embeddings
        return layers / self.owners + decoder.embeddings / self.sharing

    def __str__(self) -> str:
        """Returns the factors that are not 1."""
        names = {"replicas": self.replicas, "shards": self.shards, "context": self.context, "tensor": self.tensor}
        text = " x ".join(f"{count} {name}" for name, count in names.items() if count > 1) or "1 rank"
        return text + f", experts over {self.expert}" * (self.expert > 1) + ", layers freed" * self.reshard


def mesh_of(config: MeshConfig, ranks: int) -> Mesh:
    """Returns the mesh of so many ranks that a recipe's trainer section asks for.

    Raises:
        ConfigError: The ranks do not fill it.
    """
    try:
        shape = mesh_shape(config, ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    freed = config.reshard_after_forward is True
    return Mesh(shape.replicas, shape.shards, shape.context, shape.tensor, freed, shape.expert)


def decided(mesh: Mesh, config: TrainerConfig, decoder: Decoder, free: float) -> Mesh:
    """Returns the mesh with layers freed where ``trainer.reshard_after_forward=auto`` frees them.

    Args:
        mesh: Mesh of the ranks.
        config: The trainer's section, with its dtype resolved.
        decoder: The model.
        free: Bytes of a rank before anything is loaded.
    """
    if config.reshard_after_forward != "auto":
        return mesh
    width = 2 if config.dtype == "bfloat16" else 4
    kept = (width + 4) * mesh.whole(decoder) + STATE * mesh.own(decoder)
    return replace(mesh, reshard=mesh.sharing > 1 and kept > KEPT_SHARE * free)
