"""The policy: a Hugging Face causal LM, sharded with FSDP2, that computes the logprobs of given tokens.

Guarantees: parameters are float32 shards, compute runs in the chosen dtype; one forward pass per micro-batch; logits
of at most ``chunk`` tokens exist at one time; there is no dropout, whatever the model's config says. A model whose
logits are not ``hidden @ head.T`` (soft-capping, logit scaling, a biased head), or are random in training mode, is
refused when it is loaded, because its logprobs would be wrong.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.func import functional_call
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from agentrl.config.errors import UserError
from agentrl.models.tree_support import limited_attention, not_for_trees
from agentrl.train.logprobs import chunked_logprobs, chunked_loss
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.training_noise import remove_noise, still_random, without_noise

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]


class ModelRefused(UserError, ValueError):
    """A model cannot be trained; the message names its class and the reason."""


class Policy(nn.Module):
    """A causal LM whose forward pass returns logprobs and entropies of a micro-batch's targets.

    Args:
        model: Any Hugging Face causal LM with an unbiased linear head.
        temperature: Sampling temperature of the behavior policy.
        chunk: Number of tokens whose logits exist at one time.
    """

    def __init__(self, model: Any, temperature: float, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk = chunk

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
        hidden = hidden_states(self.model.get_decoder(), batch)
        states = hidden[batch.sources]
        weight = self.model.get_output_embeddings().weight
        nothing = hidden[0, 0] * 0  # an empty micro-batch still takes part in collectives
        head, options = (states, weight, batch.targets), {"temperature": self.temperature, "chunk": self.chunk}
        if loss_of is not None:
            return chunked_loss(*head, _chunk_loss(batch, loss_of, self.chunk), **options) + nothing
        logprobs, entropies = chunked_logprobs(*head, **options)
        return logprobs[batch.trained] + nothing, entropies[batch.trained]


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


def hidden_states(decoder: Any, batch: MicroBatch) -> Tensor:
    """Computes ``[rows * length, hidden]`` hidden states of a micro-batch, after the decoder's last norm."""
    return decoder(
        input_ids=batch.token_ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).last_hidden_state.flatten(0, 1)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raises for a model whose logits are not ``hidden @ head.T``.

    Raises:
        ModelRefused: The model's logits differ from that product.
    """
    ids = torch.arange(8, device=model.device)[None] % model.config.vocab_size
    states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    plain = states @ model.get_output_embeddings().weight.t()
    own = model(input_ids=ids, use_cache=False).logits
    gap = (plain - own).abs().max().item()
    if not gap <= 1e-3 * max(1.0, own.abs().max().item()):
        raise ModelRefused(
            f"{type(model).__name__} changes its logits after the output head (largest difference {gap:.3g}); "
            "training such a model is not supported: its logprobs would be wrong"
        )


def check_layers(config: Any, context: int) -> None:
    """Raises for a model with layers that do not attend to the whole past.

    Args:
        config: Config of a transformers model.
        context: Largest number of tokens of a sequence.

    Raises:
        ModelRefused: The model has such layers.
    """
    if others := limited_attention(config.get_text_config(), context):
        raise ModelRefused(
            f"{_class_name(config)} has {', '.join(others)} layers, which do not attend to the whole of "
            f"inference.context_length={context} tokens; such layers are not supported in training"
        )


def _class_name(config: Any) -> str:
    return (config.architectures or [type(config).__name__])[0]


def load_model(path: Path, *, gradient_checkpointing: bool = False, context: int = 0) -> Any:
    """Loads a model in float32, with PyTorch's scaled-dot-product attention and without dropout.

    Args:
        path: Model folder.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        context: Largest number of tokens of a sequence.

    Raises:
        ModelRefused: The model's logprobs would be wrong: see :func:`check_head`, :func:`check_layers`,
            :mod:`agentrl.train.training_noise` and :mod:`agentrl.models.tree_support`.
    """
    model = read_model(path, context)
    check_model(model)
    if gradient_checkpointing:
        checkpoint_layers(model)
    return model


def read_model(path: Path, context: int, *, head: bool = True, **how: Any) -> Any:
    """Reads a model in float32, without dropout, and without ``head`` its decoder alone.

    ``how`` goes to ``from_pretrained``.

    Raises:
        ModelRefused: It has layers that do not attend to the whole past, or cannot be loaded.
    """
    config = without_noise(AutoConfig.from_pretrained(str(path)))
    check_layers(config, context)
    how = {"config": config, "attn_implementation": "sdpa", **how}
    try:
        kind = AutoModelForCausalLM if head else AutoModel
        return kind.from_pretrained(str(path), dtype=torch.float32, **how)
    except (ValueError, ImportError) as error:  # no attention that we can use, a missing package
        raise ModelRefused(f"{_class_name(config)} cannot be loaded for training: {error}") from error


def check_model(model: Any) -> None:
    """Removes what is random in training mode, and raises for a model whose logprobs would be wrong.

    Raises:
        ModelRefused: They would be.
    """
    remove_noise(model)
    if random := still_random(model):
        raise ModelRefused(
            f"{type(model).__name__} cannot be trained: {random}, so its importance ratios would be wrong"
        )
    check_head(model)
    if why := not_for_trees(model):
        raise ModelRefused(f"{type(model).__name__} cannot be trained: {why}")


def checkpoint_layers(model: Any) -> None:
    """Has a model compute its layers again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


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
        policy.set_reshard_after_backward(now)
        policy.set_is_last_backward(last)


def reshard(policy: nn.Module) -> None:
    """Frees parameters that a forward pass without a backward pass left gathered, so that they are shards again."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
