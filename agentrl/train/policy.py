"""The policy: a Hugging Face causal LM, sharded with FSDP2, that computes the logprobs of given tokens.

Guarantees: parameters are float32 shards, compute runs in the chosen dtype; one forward pass per micro-batch; logits
of at most ``chunk`` tokens exist at one time; there is no dropout, whatever the model's config says. How a model
computes several sequences, and what its head does with the logits, is found by trying it when it is loaded; a model
whose logits are not a function of its decoder's hidden states, or are random in training mode, is refused then, because
its logprobs would be wrong.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.func import functional_call
from transformers import AutoModel

from agentrl.config.errors import UserError
from agentrl.core.model_files import Unreadable, one_line, read_config
from agentrl.models.auto_class import auto_class
from agentrl.models.decoder import decoder_of
from agentrl.models.folder_check import refused_folder
from agentrl.models.loading import load_weights
from agentrl.models.own_head import OwnHead, head_form, head_parameters
from agentrl.models.pixels import embedded_as, keep_pixels, pixels_of
from agentrl.models.probe import FAULTS, Unfit, find_way
from agentrl.models.routing import Routers
from agentrl.models.way import ModelForm, form_of, set_form
from agentrl.train.head import Head
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.router_balance import balancing_function, router_loss
from agentrl.train.training_noise import remove_noise, still_random, without_noise

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]


class ModelRefused(UserError, ValueError):
    """A model cannot be trained; the message names its class and the reason."""


class Policy(nn.Module):
    """A causal LM whose forward pass returns logprobs and entropies of a micro-batch's targets.

    Args:
        model: Any Hugging Face causal LM, from :func:`load_model`.
        temperature: Sampling temperature of the behavior policy.
        chunk: Number of tokens whose logits exist at one time.
        balanced: Whether the routers' load-balancing loss is computed.
    """

    def __init__(self, model: Any, temperature: float, chunk: int, balanced: bool = False) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk = chunk
        self.balanced = balanced
        self._router_loss: Tensor | None = None
        if balanced:
            balancing_function(model)  # refuses a model without routers

    def forward(self, batch: MicroBatch, loss_of: LossOf | None = None) -> tuple[Tensor, Tensor] | Tensor:
        """Computes logprobs and entropies of a micro-batch's trained tokens, or a loss of them.

        Args:
            batch: The micro-batch.
            loss_of: Function of the indices of some trained tokens, their logprobs and their entropies that returns
                their part of the loss. Its gradient is taken while their logits are in memory, so that these are
                computed only once.

        Returns:
            ``[trained]`` logprobs and ``[trained]`` entropies, both differentiable; with ``loss_of`` the loss, a
            scalar.
        """
        hidden = self._hidden(batch)
        states = hidden[batch.sources]
        nothing = hidden[0, 0] * 0  # an empty micro-batch still takes part in collectives
        form = form_of(self.model)  # found only after the weights are read
        head = Head(self.model, form.head, form.head_parameters, self.temperature, self.chunk)
        if loss_of is not None:
            return head.loss(states, batch.targets, _chunk_loss(batch, loss_of, self.chunk)) + nothing
        logprobs, entropies = head.logprobs(states, batch.targets)
        return logprobs[batch.trained] + nothing, entropies[batch.trained]

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Computes hidden states, and keeps the routers' loss where it is asked for and gradients are taken."""
        decoder = decoder_of(self.model)
        if (routers := routers_of(decoder)) is not None:
            routers.give(batch.experts)
        sharded = isinstance(self, FSDPModule)
        if not self.balanced or not torch.is_grad_enabled():
            return hidden_states(decoder, batch, sharded=sharded)
        out = _run(decoder, batch, sharded, output_router_logits=True)
        self._router_loss = router_loss(self.model, out.router_logits, batch)
        return out.last_hidden_state.flatten(0, 1)

    def take_router_loss(self) -> Tensor | None:
        """Returns the load-balancing loss of the latest forward pass, once, without its coefficient.

        ``None`` where it is not computed, and after a pass without gradients.
        """
        found, self._router_loss = self._router_loss, None
        return found


def _chunk_loss(batch: MicroBatch, loss_of: LossOf, chunk: int) -> Callable[[slice, Tensor, Tensor], Tensor]:
    """Makes the loss of a chunk of distinct predictions: the loss of all trained tokens that have one of them."""
    predictions, order = batch.trained.sort(stable=True)
    starts = torch.arange(0, len(batch.targets) + chunk, chunk, device=predictions.device)
    edges = torch.searchsorted(predictions, starts).tolist()

    def loss(rows: slice, logprobs: Tensor, entropies: Tensor) -> Tensor:
        number = rows.start // chunk
        chosen = slice(edges[number], edges[number + 1])
        these = predictions[chosen] - rows.start
        return loss_of(order[chosen], logprobs[these], entropies[these])

    return loss


def hidden_states(decoder: Any, batch: MicroBatch, *, sharded: bool = False) -> Tensor:
    """Computes ``[rows * length, hidden]`` hidden states of a micro-batch, after the decoder's last norm.

    Args:
        decoder: Decoder of a model.
        batch: The micro-batch.
        sharded: Whether ranks share its parameters. All of them use an image tower then, whether or not their own rows
            hold images: each pass of one rank is a collective.
    """
    return _run(decoder, batch, sharded).last_hidden_state.flatten(0, 1)


def _run(decoder: Any, batch: MicroBatch, sharded: bool, **how: Any) -> Any:
    """Returns what a decoder returns for a micro-batch; arguments as of :func:`hidden_states`."""
    pixels, nothing = pixels_of(decoder), None
    if sharded and pixels is not None and not batch.pixels:
        nothing = pixels.idle(decoder, batch.token_ids.device)  # first: collectives come in one order on all ranks
    with embedded_as(decoder, batch.token_ids, batch.inputs) as inputs:
        out = decoder(use_cache=False, **how, **inputs)
    if nothing is not None:
        out.last_hidden_state = out.last_hidden_state + nothing
    return out


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raises for a model whose logits are not a function of its decoder's hidden states.

    Raises:
        ModelRefused: The model's logits differ from what its head makes of these states.
    """
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    states = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    found, own = OwnHead(model)(states[0]), model(input_ids=ids, use_cache=False).logits[0]
    gap = (found - own).abs().max().item()
    if not gap <= 1e-3 * max(1.0, own.abs().max().item()):
        raise ModelRefused(
            f"the logits of {type(model).__name__} are not made of its decoder's hidden states alone (largest "
            f"difference {gap:.3g}); such a model cannot be trained: its logprobs would be wrong"
        )


def find_form(model: Any, context: int, *, packed: bool = False) -> ModelForm:
    """Finds out by trying how a model computes several sequences, and what its head does.

    Args:
        model: Causal LM as it was loaded, in float32.
        context: Largest number of tokens of a sequence.
        packed: Whether packed rows are preferred to padded ones where trees are not possible.

    Raises:
        ModelRefused: The model cannot be trained.
    """
    name = type(model).__name__
    try:
        check_head(model)
        head = head_form(model)
        if not head.scale:
            raise ModelRefused(f"{name} cannot be trained: its head multiplies the logits by 0, as its config says")
        way = find_way(model, context, packed=packed)
        return ModelForm(way, head, tuple(head_parameters(model)) if head.own else ())
    except ModelRefused:
        raise
    except Unfit as error:
        raise ModelRefused(f"{name} cannot be trained: {error}") from error
    except FAULTS as error:
        why = f"its decoder or its head cannot be called alone ({type(error).__name__}: {error})"
        raise ModelRefused(f"{name} cannot be trained: {why}") from error


def routers_of(model: Any) -> Routers | None:
    """Returns the routers to which a batch's recorded experts are given; ``None`` where routing is not replayed."""
    return getattr(decoder_of(model), "agentrl_routers", None)


def _class_name(config: Any) -> str:
    return (config.architectures or [type(config).__name__])[0]


def load_model(
    path: Path, *, gradient_checkpointing: bool = False, context: int = 0, packed: bool = False, trust: bool = False
) -> Any:
    """Loads a model in float32, with PyTorch's scaled-dot-product attention where it has it, and without dropout.

    Args:
        path: Model folder.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        context: Largest number of tokens of a sequence.
        packed: Whether packed rows are preferred to padded ones where prefix trees are not possible.
        trust: Whether code that comes with the model may run.

    Raises:
        ModelRefused: The model's logprobs would be wrong: see :func:`find_form` and
            :mod:`agentrl.train.training_noise`; or it cannot be loaded.
    """
    model = read_model(path, trust=trust)
    check_model(model, context, packed=packed)
    if gradient_checkpointing:
        checkpoint_layers(model)
    return model


def read_model(path: Path, *, head: bool = True, trust: bool = False, **how: Any) -> Any:
    """Reads a model in float32, without dropout, and without ``head`` its decoder alone.

    ``how`` goes to ``from_pretrained``.

    Raises:
        ModelRefused: It cannot be loaded.
    """
    config = without_noise(load_config(path, trust=trust))
    kind = auto_class(config) if head else AutoModel
    drawn = (".lora_",) if head else ("",)  # of adapters; parts that only a decoder alone has
    try:
        model = load_weights(kind, path, config, drawn=drawn, trust=trust, dtype=torch.float32, **how)
    except Unreadable as error:
        raise ModelRefused(f"{_class_name(config)} cannot be loaded for training: {error}") from error
    keep_pixels(model, path, trust=trust)
    return model


def check_model(model: Any, context: int = 0, *, packed: bool = False) -> None:
    """Removes what is random in training mode, and finds how the model computes several sequences.

    Args:
        model: Causal LM as it was loaded.
        context: Largest number of tokens of a sequence.
        packed: Whether packed rows are preferred to padded ones where prefix trees are not possible.

    Raises:
        ModelRefused: Its logprobs would be wrong.
    """
    remove_noise(model)
    try:
        random = still_random(model)
    except FAULTS as error:
        random = f"its forward pass fails ({one_line(error)})"
    if random:
        raise ModelRefused(f"{type(model).__name__} cannot be trained: {random}")
    set_form(model, find_form(model, context, packed=packed))


def checkpoint_layers(model: Any) -> None:
    """Has a model compute its layers again in the backward pass.

    Raises:
        ModelRefused: Its class cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelRefused(f"trainer.gradient_checkpointing: transformers' {type(model).__name__} does not support it")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def load_config(path: Path, *, trust: bool = False, weights: bool = True) -> Any:
    """Reads a model's config.

    Args:
        path: Model folder.
        trust: Whether code that comes with the model may run.
        weights: Whether the folder must hold weights.

    Raises:
        ModelRefused: The folder's model cannot be trained, or transformers does not know it.
    """
    if why := refused_folder(path, weights=weights):
        raise ModelRefused(f"the model cannot be trained: {why}")
    try:
        return read_config(path, trust=trust)
    except Unreadable as error:
        raise ModelRefused(f"the model cannot be trained: {error}") from error


def decoder_layers(model: Any) -> list[nn.Module]:
    """Returns the decoder layers, found by the model's ``_no_split_modules``; none if the model does not set it."""
    names = set(model._no_split_modules or [])
    return [m for m in model.modules() if any(kind.__name__ in names for kind in type(m).__mro__)]  # FSDP2 subclasses


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compiles the decoder layers with ``torch.compile`` at their first use, for any batch and length.

    Only the layers' ``forward`` is compiled, so that FSDP2's hooks stay outside. Shard a model before this: FSDP2
    changes a layer's class, and activation checkpointing would be lost.

    Raises:
        ModelRefused: The model does not name its decoder layers.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ModelRefused(f"trainer.compile: {type(model).__name__} does not name its decoder layers")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def shard(
    policy: Any, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool = False, free_layers: bool = False
) -> None:
    """Shards a policy or a critic with FSDP2; gradients are reduced in float32.

    Each decoder layer is a parameter group, and the rest is one more. A parameter group stays gathered from its first
    use to the update's last micro-batch (see :func:`accumulate`); with ``free_layers`` a layer is freed after each use,
    and its gradients are reduced in each micro-batch (ZeRO-3). With ``offload``, shards, their gradients and the
    optimizer's moments stay in CPU memory. A mesh of two dimensions is of replicas and shards (HSDP).
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    keep = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for module in (*decoder_layers(policy.model), policy):
        fully_shard(
            module, mesh=mesh, mp_policy=precision, offload_policy=keep,
            reshard_after_forward=free_layers and module is not policy,
        )  # fmt: skip
    policy.frees_layers = free_layers


def compute_in(policy: Any, dtype: torch.dtype) -> None:
    """Makes an unsharded policy or critic compute in ``dtype``; parameters and gradients stay float32.

    It replaces FSDP2's mixed precision on a single rank, without second copies of parameters and gradients. It does not
    work with activation checkpointing, whose recomputation would not use the converted parameters.
    """
    inner = ClassForward(policy)

    def forward(*args: Any) -> Any:
        converted = {name: parameter.to(dtype) for name, parameter in inner.named_parameters()}
        return functional_call(inner, converted, args)

    policy.forward = forward


class ClassForward(nn.Module):
    """Calls the forward pass of a module's class, also when the module's ``forward`` was replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        """Calls the forward pass of the module's class."""
        return type(self.module).forward(self.module, *args)


def accumulate(policy: nn.Module, *, last: bool) -> None:
    """Has FSDP2 reduce gradients and free gathered parameters only after an update's ``last`` micro-batch.

    A policy that frees its layers after each use does both in every micro-batch: whole gradients would not fit.
    """
    if isinstance(policy, FSDPModule):
        now = last or getattr(policy, "frees_layers", False)
        policy.set_requires_gradient_sync(now)
        policy.set_requires_all_reduce(last)  # over replicas, once an update
        policy.set_reshard_after_backward(now)
        policy.set_is_last_backward(last)


def reshard(policy: nn.Module) -> None:
    """Frees parameters that a forward pass without a backward pass left gathered, so that they are shards again."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
