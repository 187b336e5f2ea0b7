"""Entry point of a trainer rank: ``torchrun -m agentrl.train --run-dir runs/x --model DIR --controller URL``.

Guarantees: SIGTERM ends the rank at once and removes its shared memory; nothing is left behind on an exception either.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.config.recipe import Recipe, TrainerConfig
from agentrl.core.registry import load
from agentrl.host.process import die_with_parent
from agentrl.train.controller_client import ControllerClient, ControllerError
from agentrl.train.critic import Critic, ValueLearner
from agentrl.train.lean import keep_less
from agentrl.train.learner import PolicyLearner
from agentrl.train.policy import Policy, compile_layers, compute_in, load_model, shard
from agentrl.train.row_attention import choose_attention
from agentrl.train.trainer import Trainer, TrainingStopped
from agentrl.weights.broadcast_publisher import BroadcastPublisher
from agentrl.weights.file_publisher import Publisher, WeightPublisher
from agentrl.weights.gather import Weight
from agentrl.weights.transport import recipe_transport

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively, float32 elsewhere (emulated, bfloat16 is much slower)."""
    if device.type == "cuda":
        return torch.bfloat16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """A recipe's dtype on this device."""
    return native_dtype(device) if name == "auto" else DTYPES[name]


def build_trainer(recipe: Recipe, model_path: Path, run_dir: Path, client: ControllerClient | None) -> Trainer:
    """Load, shard and wire everything on this rank; the process group is up already."""
    config = recipe.trainer
    on_gpu = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = make_policy(recipe, model_path, mesh, device)
    reference: nn.Module | None = None
    if config.kl_coef > 0 and config.lora_rank is None:
        reference = make_policy(recipe, model_path, mesh, device).requires_grad_(False)
    elif config.kl_coef > 0:
        from agentrl.train.lora import BasePolicy

        reference = BasePolicy(policy)
    publisher = make_publisher(recipe, policy, run_dir, device, client)
    critic = make_critic(recipe, model_path, mesh, device) if config.advantage == "gae" else None
    engine = PolicyLearner(policy, reference, config, device, critic)
    if device.type == "cpu":
        learned = [*policy.parameters(), *(critic.critic.parameters() if critic is not None else ())]
        take_memory(3 * sum(p.numel() * p.element_size() for p in learned if p.requires_grad))  # gradients, two moments
    made: type[Trainer] = load("trainer", config.type or "grpo")
    return made(recipe, model_path, run_dir, engine, publisher, client)


def make_model(config: TrainerConfig, model_path: Path, device: torch.device, context: int) -> Any:
    """The starting model as it was saved, for sequences of up to ``context`` tokens."""
    model = load_model(model_path, gradient_checkpointing=config.gradient_checkpointing, context=context)
    choose_attention(model, config, device)
    return model


def make_policy(recipe: Recipe, model_path: Path, mesh: DeviceMesh, device: torch.device) -> Policy:
    """The starting policy, with adapters where the recipe trains those."""
    config = recipe.trainer
    model = make_model(config, model_path, device, recipe.inference.context_length)
    if config.lora_rank is not None:
        from agentrl.train.lora import add_adapter  # PEFT is there where it is asked for

        add_adapter(model, config, seed=recipe.seed, base=recipe.model.name)
    return prepared(Policy(model, recipe.sampling.temperature, config.logprob_chunk), config, mesh, device)


def make_critic(recipe: Recipe, model_path: Path, mesh: DeviceMesh, device: torch.device) -> ValueLearner:
    """A critic that starts from the policy's decoder, all its weights trained."""
    decoder = make_model(recipe.trainer, model_path, device, recipe.inference.context_length).get_decoder()
    return ValueLearner(prepared(Critic(decoder), recipe.trainer, mesh, device), recipe.trainer, device)


def prepared(module: Any, config: TrainerConfig, mesh: DeviceMesh, device: torch.device) -> Any:
    """A policy or a critic on its device, sharded and compiled as the recipe says.

    One rank without a card has nothing to gather, only to copy: it is not sharded, unless something here needs FSDP2.
    """
    dtype = resolve_dtype(config.dtype, device)
    module.to(device)
    if not config.compile:
        keep_less(module.model)
    alone = mesh.size() == 1 and not config.cpu_offload
    if (
        alone
        and dtype != torch.float32
        and device.type == "cpu"
        and not (config.compile or config.gradient_checkpointing)
    ):
        compute_in(module, dtype)
    elif not alone or dtype != torch.float32:
        shard(module, mesh, dtype, offload=config.cpu_offload)
    if config.compile:
        compile_layers(module.model)
    return module


def make_publisher(
    recipe: Recipe, policy: Policy, run_dir: Path, device: torch.device, client: ControllerClient | None
) -> Publisher:
    """The way out for the weights that the recipe names."""
    folder, is_writer = run_dir / "weights", dist.get_rank() == 0
    transport, chosen = recipe.weights.transport, recipe_transport(recipe)
    dtype = resolve_dtype(recipe.inference.dtype, device)
    weights: Iterable[tuple[str, Weight]] = policy.model.named_parameters()
    if recipe.trainer.lora_rank is not None:
        from agentrl.weights.lora_weights import plain_weights

        weights = plain_weights(policy.model)
        if recipe.trainer.lora_push == "adapter" and transport != "broadcast":
            from agentrl.weights.adapter_publisher import AdapterPublisher

            return AdapterPublisher(policy.model, dtype, transport, folder, is_writer=is_writer)
    if chosen != "broadcast":
        way = "disk" if chosen == "disk" or transport == "broadcast" else transport
        return WeightPublisher(weights, dtype, way, folder, is_writer=is_writer)
    files = WeightPublisher(weights, dtype, "disk", folder, is_writer=is_writer)
    return BroadcastPublisher(files, client, device, recipe.weights.lease_seconds)


def take_memory(nbytes: int) -> None:
    """Have the allocator take memory from the system now, while the first batch is sampled, and keep it.

    On a virtual machine the first touch of a page can cost more than the arithmetic on it; the launcher's environment
    makes the allocator keep what is freed here.
    """
    torch.empty(nbytes // 4, dtype=torch.float32).zero_()


def main(argv: list[str] | None = None) -> int:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="agentrl.train")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    die_with_parent()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    recipe = Recipe.model_validate_json((args.run_dir / "config.json").read_text())
    threads = recipe.trainer.threads or max(1, (os.cpu_count() or 1) // recipe.trainer.nproc)
    torch.set_flush_denormal(True)  # moments that fade to below 1e-38 would be slow; before there are threads
    torch.set_num_threads(threads)
    use_cuda = recipe.launch.device != "cpu" and torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # gloo beside NCCL: batches travel between the hosts of the ranks, and with cpu_offload gradients stand there
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    client = ControllerClient(args.controller, recipe.trainer.batch_timeout) if dist.get_rank() == 0 else None
    if client is not None:
        client.start_heartbeat()
    trainer = build_trainer(recipe, args.model, args.run_dir, client)
    try:
        if args.resume:
            trainer.resume()
        trainer.run()
    except (ControllerError, TrainingStopped) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        trainer.publisher.close()
        dist.destroy_process_group()
    return 0


def _exit_on_signal(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
