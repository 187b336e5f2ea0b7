"""Entry point of a trainer rank: ``torchrun -m agentrl.train --run-dir runs/x --model DIR --controller URL``.

Guarantees: SIGTERM ends the rank at once and removes its shared memory; nothing is left behind on an exception either.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from agentrl.config.recipe import Recipe
from agentrl.core.process import die_with_parent
from agentrl.core.registry import load
from agentrl.train.broadcast import BroadcastPublisher
from agentrl.train.controller_client import ControllerClient, ControllerError
from agentrl.train.critic import Critic, ValueLearner
from agentrl.train.engine import TrainEngine
from agentrl.train.packed import is_packed, use_tree_attention
from agentrl.train.policy import Policy, load_model, shard
from agentrl.train.publish import Publisher, WeightPublisher
from agentrl.train.trainer import Trainer, TrainingStopped

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
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = resolve_dtype(config.dtype, device)

    def make_model() -> Any:
        model = load_model(model_path, gradient_checkpointing=config.gradient_checkpointing)
        if is_packed(config.attention, device):
            use_tree_attention(model)
        return model.to(device)

    def sharded(module: Any) -> Any:
        if mesh.size() > 1 or dtype != torch.float32:  # else there is nothing to shard or to convert, only to copy
            shard(module, mesh, dtype)
        return module

    def make_policy() -> Policy:
        return sharded(Policy(make_model(), recipe.sampling.temperature, config.logprob_chunk))

    def make_critic() -> ValueLearner:
        return ValueLearner(sharded(Critic(make_model().get_decoder()).to(device)), config, device)

    policy = make_policy()
    reference = make_policy().requires_grad_(False) if config.kl_coef > 0 else None
    files = WeightPublisher(
        policy.model.named_parameters(),
        resolve_dtype(recipe.inference.dtype, device),
        "disk" if recipe.weights.transport == "broadcast" else recipe.weights.transport,
        run_dir / "weights",
        is_writer=dist.get_rank() == 0,
    )
    publisher: Publisher = files
    if recipe.weights.transport == "broadcast":
        publisher = BroadcastPublisher(files, client, device, recipe.weights.lease_seconds)
    critic = make_critic() if config.advantage == "gae" else None
    engine = TrainEngine(policy, reference, config, device, critic)
    if device.type == "cpu":
        learned = [*policy.parameters(), *(critic.critic.parameters() if critic is not None else ())]
        take_memory(3 * sum(p.numel() * p.element_size() for p in learned))  # gradients and two moments
    made: type[Trainer] = load("trainer", config.type or "grpo")
    return made(recipe, model_path, run_dir, engine, publisher, client)


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
    dist.init_process_group("nccl" if use_cuda else "gloo")
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
