"""LoRA through PEFT: adds adapters to the policy's model, turns them off for a reference policy, and saves them.

Guarantees: only adapters get gradients; they start with zero effect and with the same values on every rank; saved
adapters have PEFT's file format. The output head and the embeddings get no adapter, because logprobs are computed from
the head's weight directly.
"""

import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from agentrl.config.adapter import AdapterConfig
from agentrl.core.model_files import one_line
from agentrl.models.auto_class import auto_class
from agentrl.models.linear_layers import linear_layers, stacked_share, text_targets
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import ModelRefused, Policy
from agentrl.weights.gather import full_tensor, own_part
from agentrl.weights.lora_weights import ADAPTER, ADAPTER_FILE, adapter_weights, write_config
from agentrl.weights.own_parts import keep_part


def add_adapter(model: Any, config: AdapterConfig, *, seed: int, base: str) -> None:
    """Adds an adapter to the linear layers of ``model``, in place, and freezes all other parameters.

    Args:
        model: Hugging Face causal LM, not sharded yet.
        config: LoRA settings; ``lora_rank`` must be set.
        seed: Seed of the adapters' initial values.
        base: Name of the base model in the saved adapter's config.

    Raises:
        ModelRefused: A target is not a linear layer of the model, or is its output head; or it has the name of another
            module too.
    """
    assert config.lora_rank is not None
    made = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type] - PEFT only divides it, so a float works
        target_modules=adapter_targets(model, config),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=base,
    )
    try:
        with torch.random.fork_rng(devices=[]), _unnamed(model):
            torch.manual_seed(seed)
            inject_adapter_in_model(made, model)
    except ValueError as error:
        raise ModelRefused(f"trainer.lora_targets={list(config.lora_targets)}: {one_line(error)}") from error


@contextmanager
def _unnamed(model: Any) -> Iterator[None]:
    """Hides the type of a model from PEFT.

    By it PEFT moves the adapters of dense layers to stacked experts, whose weights it then wraps, and refuses layers of
    state-space models whose weights a kernel reads without calling them: such adapters get no gradient and do nothing.
    """
    config = model.config
    config.__dict__["model_type"] = ""
    try:
        yield
    finally:
        del config.__dict__["model_type"]


def adapter_targets(model: Any, config: AdapterConfig) -> list[str]:
    """Returns the names of the linear layers that get an adapter: by default all of the text side.

    A name that the recipe gives is taken wherever it stands, in an image tower too.

    Raises:
        ModelRefused: A target is not a linear layer of the model, or is its output head.
    """
    if not config.lora_targets:
        return text_targets(model)
    linear, targets = {one.name for one in linear_layers(model)}, set(config.lora_targets)
    if unknown := sorted(targets - linear):
        raise ModelRefused(
            f"trainer.lora_targets={unknown} are no linear layers of the model; it has {', '.join(sorted(linear))}"
        )
    return sorted(targets)


def names_in_files(path: Path, config: AdapterConfig, *, trust: bool = False) -> dict[str, str]:
    """Maps the names of adapted layers' weights in a model's files, as patterns, to those in the adapted model.

    Args:
        path: Model folder.
        config: LoRA settings.
        trust: Whether code that comes with the model may run.
    """
    with torch.device("meta"):
        own = AutoConfig.from_pretrained(str(path), trust_remote_code=trust)
        model = auto_class(own).from_config(own, trust_remote_code=trust)
    targets = adapter_targets(model, config)
    paths = [one.path for one in linear_layers(model) if one.path in targets or one.name in targets]
    adapted = {_ending(path) for path in paths} if stacked_share(model) else targets
    return {
        rf"(?<![^.]){re.escape(name)}\.{kind}$": f"{name}.base_layer.{kind}"
        for name in adapted
        for kind in ("weight", "bias")
    }


def _ending(path: str) -> str:
    """Returns a layer's name with that of the module that holds it: experts in files have layers of the same name."""
    parts = path.split(".")
    last = next((n for n in range(len(parts) - 2, -1, -1) if not parts[n].isdigit()), 0)
    return ".".join(parts[last:])


@torch.no_grad()
def start_adapter(model: nn.Module, *, seed: int) -> None:
    """Gives a sharded model's adapters the values that :func:`add_adapter` gives them, and freezes the rest.

    The model was without memory when they were added. A layer's values are drawn whole, which is little, and each rank
    keeps its part.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        for layer in layers:
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            drawn = nn.Linear(down.shape[1], down.shape[0], bias=False, device="cpu")  # as PEFT draws
            nn.Linear(up.shape[1], up.shape[0], bias=False, device="cpu")
            nn.init.kaiming_uniform_(drawn.weight, a=math.sqrt(5))
            keep_part(down, drawn.weight)
            own_part(up).zero_()


class BasePolicy(nn.Module):
    """The policy with its adapters turned off: a reference policy without weights of its own.

    Args:
        policy: Policy with adapters.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See :meth:`Policy.forward`."""
        with rescale_adapter_scale(self.policy.model, 0.0):
            return self.policy(batch)


def save_adapter(model: nn.Module, target: Path) -> None:
    """Writes the adapter in PEFT's format atomically; a collective, rank 0 writes."""
    state = {name: full_tensor(parameter).cpu() for name, parameter in adapter_weights(model)}
    if dist.get_rank() == 0:
        partial = target.with_name(f".partial-{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_config(model, partial)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, partial / ADAPTER_FILE)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    dist.barrier()
