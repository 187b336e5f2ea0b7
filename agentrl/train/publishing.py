"""Makes the publisher that brings a policy's weights to the inference servers, in the names that they know.

Guarantees: names and shapes are those that the kind of server takes; where these are the ones of the model's files they
were compared with the files before training starts, because a server may ignore a name that it does not know.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.config.recipe import Recipe
from agentrl.train.controller_client import ControllerClient
from agentrl.train.export import saved_buffers
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import ModelRefused, Policy
from agentrl.train.rank import DTYPES
from agentrl.weights.broadcast_publisher import BroadcastPublisher
from agentrl.weights.file_names import file_buffers, file_weights, wrong_names
from agentrl.weights.file_publisher import Publisher, WeightPublisher
from agentrl.weights.gather import Weight


def make_publisher(
    recipe: Recipe,
    policy: Policy,
    run_dir: Path,
    device: torch.device,
    client: ControllerClient | None,
    mesh: RankMesh,
    model_path: Path,
) -> Publisher:
    """Makes the publisher for the weight transport and the names that the resolved recipe says.

    Args:
        recipe: Resolved recipe.
        policy: The policy.
        run_dir: Folder of the run.
        device: Device of this rank.
        client: Client of the controller on rank 0.
        mesh: Mesh of the ranks.
        model_path: Folder of the model that trainer and servers were started with.

    Raises:
        ModelRefused: The servers would not know the names of its weights.
    """
    folder, is_writer, transport = run_dir / "weights", dist.get_rank() == 0, recipe.weights.transport
    assert transport != "auto", "the launcher resolves it"
    place = (mesh.tensor_rank, mesh.shape.tensor)
    dtype, model = DTYPES[recipe.inference.dtype], policy.model
    weights: Iterable[tuple[str, Weight]] = model.named_parameters()
    if recipe.trainer.lora_rank is not None:
        from agentrl.weights.lora_weights import plain_weights

        weights = plain_weights(model)
        if recipe.trainer.lora_push == "adapter" and transport != "broadcast":
            from agentrl.weights.adapter_publisher import AdapterPublisher

            return AdapterPublisher(model, dtype, transport, folder, is_writer=is_writer)
    beside: dict[str, torch.Tensor] = {}
    if recipe.weights.names == "files":
        weights = checked_names(model, list(weights), model_path)
        beside = file_buffers(model, saved_buffers(model), model_path)
    kind = "disk" if transport == "broadcast" else transport
    files = WeightPublisher(weights, dtype, kind, folder, is_writer=is_writer, tensor=place, beside=beside)
    if transport != "broadcast":
        return files
    return BroadcastPublisher(files, client, device, recipe.weights.lease_seconds)


def checked_names(model: Any, weights: list[tuple[str, Weight]], model_path: Path) -> list[tuple[str, Weight]]:
    """Returns weights with the names of the model's files, which the servers have read.

    Raises:
        ModelRefused: The files have other names.
    """
    found = file_weights(model, weights)
    if wrong := wrong_names(found, model_path, model.base_model_prefix):
        raise ModelRefused(
            f"the servers would not know weights of {type(model).__name__} by the names that they are sent with "
            f"({wrong}); use inference.engine=embedded, or save the model anew with save_pretrained"
        )
    return found
