"""The trainer's device mesh as a plan sees it: replicas x shards x context x tensor.

Guarantees: pure; the product of the four is the number of ranks.
"""

from dataclasses import dataclass

from agentrl.config.errors import ConfigError
from agentrl.plan.decoder import Decoder


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
    """

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    reshard: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards * self.context * self.tensor

    @property
    def rows(self) -> int:
        """Number of ranks, or groups of ranks, that compute different rows."""
        return self.replicas * self.shards

    @property
    def owners(self) -> int:
        """Number of ranks that a parameter's state is divided among; context ranks shard it as well."""
        return self.shards * self.context * self.tensor

    def __str__(self) -> str:
        """Returns the factors that are not 1."""
        names = {"replicas": self.replicas, "shards": self.shards, "context": self.context, "tensor": self.tensor}
        text = " x ".join(f"{count} {name}" for name, count in names.items() if count > 1) or "1 rank"
        return text + ", reshard" * self.reshard


def mesh_of(ranks: int, *, replicas: int = 1, context: int = 1, tensor: int = 1, reshard: bool = False) -> Mesh:
    """Returns the mesh of so many ranks whose number of shards is what is left.

    Raises:
        ConfigError: The ranks are not a multiple of the other three.
    """
    fixed = replicas * context * tensor
    if ranks % fixed or ranks < fixed:
        raise ConfigError(
            f"{ranks} trainer ranks are not a multiple of {replicas} replicas x {context} context x {tensor} tensor"
        )
    return Mesh(replicas, ranks // fixed, context, tensor, reshard)


def check_mesh(mesh: Mesh, decoder: Decoder) -> None:
    """Checks that a model's heads can be divided among tensor ranks.

    Raises:
        ConfigError: They cannot.
    """
    if decoder.kv_heads % mesh.tensor or decoder.heads % mesh.tensor:
        raise ConfigError(
            f"--tensor {mesh.tensor} does not divide the model's {decoder.kv_heads} key heads and {decoder.heads} "
            "query heads"
        )
