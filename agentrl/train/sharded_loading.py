"""Loads a model onto a mesh of ranks, each rank its own part: no rank ever holds the whole model.

Guarantees: parameters exist without memory until they are sharded; a rank reads from the files only what it keeps;
names, dtypes, stacked experts and tied weights are converted as transformers does; the rest of training sees the same
modules as after :func:`agentrl.train.policy.load_model`.

transformers' own loader is used, because it alone knows how the names and experts of a checkpoint map to a model. Its
plan for FSDP is not: our policy calls the decoder alone, and reads the head's weight, so that the policy and not the
model must be FSDP2's root. There is no public hook for this: two of transformers' class methods are replaced while a
model loads.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.distributed.utils import TransformersDeviceMesh
from transformers.utils import logging

from agentrl.config.recipe import TrainerConfig
from agentrl.core.image_reader import has_image_class
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import ClassForward, read_model, reshard

PARTIAL = "replicated_with_grad_allreduce"  # transformers' name for weights that see a part of the heads


def loads_whole(path: Path, config: TrainerConfig, mesh: RankMesh) -> str | None:
    """Says why each rank must load the whole model before it is sharded; ``None`` if each can load its own part."""
    if mesh.shape.size == 1:
        return "there is one rank"
    if config.cpu_offload:
        return "with trainer.cpu_offload the shards are in the host's memory"
    if not list(path.glob("*.safetensors")):
        return "the model's files are not safetensors"
    plain = SimpleNamespace(**json.loads((path / "config.json").read_text()))  # brought code does not run here
    if config.lora_rank is not None and has_image_class(plain):
        return "adapters of the text side alone are told from an image tower by their modules"
    return None


def load_sharded(
    path: Path,
    mesh: RankMesh,
    wrap: Callable[[Any], nn.Module],
    shard: Callable[[nn.Module], None],
    dtype: torch.dtype,
    *,
    head: bool = True,
    trust: bool = False,
    names: dict[str, str] | None = None,
) -> Any:
    """Loads a model sharded; a collective.

    Args:
        path: Model folder with safetensors files.
        mesh: Mesh of the ranks.
        wrap: Function of the model that returns the policy or critic around it.
        shard: Function that shards that, except experts that are split already.
        dtype: Compute dtype.
        head: Whether to load the output head.
        trust: Whether code that comes with the model may run.
        names: Patterns of names in the files, and what they are in what ``wrap`` makes of the model. Of what is then
            still missing in the files the caller sets the values.

    Returns:
        The policy or critic.

    Raises:
        ModelRefused: The model cannot be trained, or not be split as asked.
    """
    made: list[Any] = []

    def distribute(model: Any, config: DistributedConfig, manager: TransformersDeviceMesh) -> Any:
        experts = _split(model, config, manager)
        model.tie_weights()  # before FSDP2 sees two weights, of which it would keep two padded shards
        made.append(wrap(model))
        _shard_experts(experts, mesh, dtype)
        shard(made[0])
        return model

    shape = mesh.shape
    config = DistributedConfig(
        dp_replicate_size=shape.replicas,
        fsdp_size=shape.shards * shape.context,
        tp_size=shape.tensor,
        ep_size=shape.expert,
        ep_implementation="auto" if shape.expert == 1 else "all_to_all",
    )
    before = logging.get_verbosity()
    if names or not head:
        logging.set_verbosity_error()  # it would list each weight that is not in the files, or not in the model
    try:
        with _hooks(mesh, distribute):
            model = read_model(path, head=head, trust=trust, distributed_config=config, key_mapping=names)
    finally:
        logging.set_verbosity(before)
    del model.config.distributed_config  # saving a model looks at it
    own_storages(model)
    return made[0]


def own_storages(model: nn.Module) -> None:
    """Gives each sharded parameter memory of its own: it was loaded as a part of the whole one's.

    The whole one would stay in memory, and DCP cannot save a part that begins behind the start of its storage.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    local = DTensor(parameter.to_local().detach().clone(), parameter._spec, requires_grad=False)
                    made[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])


def _split(model: Any, config: DistributedConfig, manager: TransformersDeviceMesh) -> list[nn.Module]:
    """Splits matrices and experts by transformers' plans, before anything has memory; returns the split experts."""
    model.config.distributed_config = config
    model._mesh_manager, model._device_mesh = manager, manager.get_mesh(("pp", "fsdp", "tp"))
    model._is_distributed_loading_by_transformers = True
    model._tp_size, model._fsdp_size = config.tp_size, config.fsdp_size
    tensor, expert = config.tp_size or 1, config.ep_size or 1
    if tensor == expert == 1:
        return []
    # It warns of each matrix that is gathered over two dimensions of the mesh: they are exported one by one.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    whole = (model.get_input_embeddings(), model.get_output_embeddings())  # whose weights the policy reads directly
    named = {name: module for name, module in model.named_modules() if any(module is one for one in whole)}
    model._tp_plan = {**model.tp_plan, **dict.fromkeys(named, "replicate")}
    tensor_plan, expert_plan, _ = model._resolve_parallel_plans(config)
    if tensor > 1:
        for name, module in model.named_modules():
            if tensor_plan.get(name) == PARTIAL:
                del tensor_plan[name]
                sum_gradients(module, manager.get_mesh("tp").get_group())
        apply_tensor_parallelism(model, manager.get_mesh("tp"), tensor_plan)
    if expert > 1:
        apply_expert_parallelism(
            model, manager.get_mesh("ep"), manager.get_mesh("tp"), expert_plan,
            ep_implementation=config.ep_implementation,
        )  # fmt: skip
    return [module for name, module in model.named_modules() if expert_plan.get(name) == "ep_dispatch_experts"]


def _shard_experts(experts: list[nn.Module], mesh: RankMesh, dtype: torch.dtype) -> None:
    """Shards split experts over the ranks that hold the same ones.

    An expert gets the tokens of all ranks of its group, so its gradient is a sum over these already: it is divided by
    the same number as all other gradients, which is not the number of ranks that it is reduced over.
    """
    names = ("dp_replicate", "efsdp") if mesh.shape.replicas > 1 else ("efsdp",)
    for module in experts:
        of_experts = mesh.experts[names]
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        split: Any = fully_shard(module, mesh=of_experts, mp_policy=precision, reshard_after_forward=False)
        split.set_gradient_divide_factor(float(mesh.averaged))
        if mesh.experts["efsdp"].size() > 1:
            split.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces


class _Summed(torch.autograd.Function):
    """Returns a tensor as it is; its gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Has a module whose ranks see other heads sum its weights' gradients over them.

    transformers' own hook sums what has been accumulated so far, and so counts earlier micro-batches again.
    """
    inner = ClassForward(module)

    def forward(*args: Any) -> Any:
        weights = {name: _Summed.apply(weight, group) for name, weight in inner.named_parameters()}
        return functional_call(inner, weights, args)

    module.forward = forward


@contextmanager
def _hooks(
    mesh: RankMesh, distribute: Callable[[Any, DistributedConfig, TransformersDeviceMesh], Any]
) -> Iterator[None]:
    """Replaces how transformers makes its mesh, and what it does with a model before its weights are read."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device == "cuda" else torch.device(mesh.device)
    experts = mesh.experts if mesh.shape.expert > 1 else mesh.parameters  # a mesh makes groups, which takes time
    manager = TransformersDeviceMesh(mesh.parameters, experts)
    owner = mixin.DistributedMixin
    before = {name: owner.__dict__[name] for name in ("prepare_distribute_model", "maybe_distribute_model")}
    owner.prepare_distribute_model = classmethod(  # type: ignore[assignment]
        lambda cls, config, device_map=None: (config, device, manager)
    )
    owner.maybe_distribute_model = classmethod(  # type: ignore[assignment]
        lambda cls, model, config, manager: distribute(model, config, manager)
    )
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(owner, name, method)


def inside(module: nn.Module, compute: Callable[[], Any]) -> Any:
    """Calls a function while FSDP2 has gathered the parameters outside of the layers; a collective.

    Args:
        module: Sharded policy or critic.
        compute: Function that uses its model without gradients.
    """
    module.forward = lambda: compute()
    try:
        with torch.no_grad():
            return module()
    finally:
        del module.forward
        reshard(module)
