"""Settings of a run on several machines: sections of Slurm and TLS, and settings that contradict one another."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agentrl.config.section import Section
from agentrl.config.supervised import SUPERVISED

OWN_RAY = "local"  # launch.ray_address of a cluster that the run starts and ends; Ray's own word for it

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe


class TlsConfig(Section):
    """TLS of what listens beyond this machine."""

    certificate: str | None = Field(
        default=None, description="File of the certificate (PEM), with the addresses of the machines that listen."
    )
    key: str | None = Field(default=None, description="File of its private key (PEM).")
    ca: str | None = Field(
        default=None, description="File of the authority (PEM) that clients trust; null: those of the system."
    )


class SlurmConfig(Section):
    """The job that ``launch.type=slurm`` submits: one task on each node of the trainer and of the servers."""

    args: tuple[str, ...] = Field(
        default=(), description="More options of sbatch, e.g. --partition=gpu, --gres=gpu:8, --time=08:00:00."
    )
    server_args: tuple[str, ...] = Field(
        default=(),
        description="Options of sbatch for the nodes of inference.nodes, e.g. --partition=l40: they are then a "
        "component of their own in a heterogeneous job.",
    )
    worker_args: tuple[str, ...] = Field(
        default=(),
        description="Options of sbatch for the nodes of rollout.nodes, e.g. --partition=cpu: they are then a component "
        "of their own too.",
    )
    modules: tuple[str, ...] = Field(default=(), description="Environment modules to load, e.g. cuda/12.8.")
    setup: tuple[str, ...] = Field(
        default=(), description="Lines of shell before the run: source .venv/bin/activate, export NCCL_DEBUG=INFO."
    )
    container: str | None = Field(
        default=None,
        description="Container image in which each launcher runs: srun's --container-image of Pyxis, with the run's "
        "folder and the working folder mounted.",
    )
    container_args: tuple[str, ...] = Field(
        default=(), description="More options of srun for the container, e.g. --container-mounts=/data:/data."
    )
    save_seconds: Annotated[int, Field(ge=0)] = Field(
        default=120,
        description="Seconds before the job's time limit or its preemption at which it saves and is queued again; 0: "
        "not at all.",
    )


def machine_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions between the machines of a run and the launch section."""
    nodes, launch = recipe.trainer.nodes, recipe.launch
    resources = ("ray_address", "ray_resources", "ray_server_resources", "ray_worker_resources")
    for key, kinds in {**dict.fromkeys(resources, ("ray",)), "restarts": ("ray", "slurm")}.items():
        if getattr(launch, key) and launch.type not in kinds:
            yield f"launch.{key} does nothing with launch.type={launch.type}"
    if launch.type != "local":
        for key in ("head", "port", "node_rank"):
            if getattr(launch, key):
                yield f"launch.{key} is chosen with launch.type={launch.type}, it cannot be set"
    if launch.type != "slurm" and launch.slurm != type(launch.slurm)():
        yield f"launch.slurm does nothing with launch.type={launch.type}"
    yield from _server_contradictions(recipe)
    yield from _worker_contradictions(recipe)
    yield from _tls_contradictions(recipe)
    counts = {"trainer": nodes, "rollout": recipe.rollout.nodes, "inference": recipe.inference.nodes}
    named = [f"{part}.nodes={count}" for part, count in counts.items() if count > (part == "trainer")]
    if launch.ray_address == OWN_RAY and named:
        yield f"launch.ray_address={OWN_RAY} starts a cluster of this machine alone, too small for {named[0]}"
    if launch.type != "local":
        return
    if named and launch.head is None:
        yield f"{named[0]} needs launch.head=HOST, the address of node 0"
    if launch.node_rank >= sum(counts.values()) and recipe.inference.max_servers is None:
        more = "".join(f" + {text}" for text in named if not text.startswith("trainer"))
        yield f"launch.node_rank={launch.node_rank} is not below trainer.nodes={nodes}{more}"
    if nodes > 1 and recipe.trainer.type is None:
        yield f"trainer.nodes={nodes} does nothing with trainer.type=null"
    for key, value in (("head", launch.head), ("port", launch.port or None)):
        if not named and value is not None:
            yield f"launch.{key}={value} does nothing with trainer.nodes=1"


def _worker_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions of rollout workers on machines of their own."""
    own, launch = recipe.rollout, recipe.launch
    if own.nodes > own.workers:
        yield f"rollout.nodes={own.nodes} is larger than rollout.workers={own.workers}: a machine would be idle"
    if own.nodes and recipe.trainer.type is None:
        yield f"rollout.nodes={own.nodes} does nothing with trainer.type=null"
    if launch.ray_worker_resources and not own.nodes:
        yield "launch.ray_worker_resources does nothing with rollout.nodes=0"
    if launch.slurm.worker_args and not own.nodes:
        yield "launch.slurm.worker_args does nothing with rollout.nodes=0"


def _server_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions of servers on machines of their own."""
    own, launch = recipe.inference, recipe.launch
    if own.nodes and own.urls:
        yield f"inference.nodes={own.nodes} does nothing with inference.urls, whose servers run already"
    if own.nodes and (recipe.trainer.type is None or recipe.trainer.type in SUPERVISED):
        yield f"inference.nodes={own.nodes} does nothing with trainer.type={recipe.trainer.type or 'null'}"
    if own.nodes > own.servers:
        yield f"inference.nodes={own.nodes} is larger than inference.servers={own.servers}: a machine would be idle"
    if own.nodes and recipe.weights.transport == "shm":
        yield (
            f"weights.transport=shm does not leave this machine, and the servers stand on inference.nodes={own.nodes} "
            "others; use weights.transport=auto"
        )
    if launch.ray_server_resources and not own.nodes:
        yield "launch.ray_server_resources does nothing with inference.nodes=0"
    if launch.slurm.server_args and not own.nodes:
        yield "launch.slurm.server_args does nothing with inference.nodes=0"
    if own.port and not own.nodes:
        yield f"inference.port={own.port} does nothing with inference.nodes=0"
    if own.max_servers is not None:
        if own.max_servers < own.servers:
            yield f"inference.max_servers={own.max_servers} is less than inference.servers={own.servers}"
        if not own.nodes:
            yield (
                f"inference.max_servers={own.max_servers} adds nodes of servers: it needs inference.nodes=1 or more, "
                "and launch.type=ray"
            )
        elif launch.type == "slurm":
            yield "inference.max_servers needs launch.type=ray: a job of Slurm has the nodes that it has"


def _tls_contradictions(recipe: "Recipe") -> Iterator[str]:
    tls = recipe.launch.tls
    if (tls.certificate is None) != (tls.key is None):
        yield "launch.tls needs both certificate and key"
    alone = recipe.trainer.nodes == 1 and not recipe.inference.nodes and not recipe.rollout.nodes
    if tls.certificate is not None and alone:
        yield "launch.tls.certificate does nothing with a single machine: nothing listens beyond it"
