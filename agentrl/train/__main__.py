"""Entry point of a trainer rank: ``torchrun -m agentrl.train --run-dir runs/x --model DIR --controller URL``.

Guarantees: the rank removes its shared memory when it ends, also after SIGTERM or an exception; SIGTERM ends it at
once. A model that cannot be trained is refused before the first batch, after a trial of a whole update.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run
from agentrl.config.mesh import mesh_shape
from agentrl.config.recipe import Recipe, TrainerConfig
from agentrl.core.registry import load
from agentrl.host.entry import begin, refuse, run_arguments
from agentrl.models.decoder import decoder_of
from agentrl.models.linear_layers import stacked_share
from agentrl.models.probe import find_way
from agentrl.models.way import ModelForm, Way, form_of, set_form
from agentrl.train.checkpoint_saver import END_SECONDS, CheckpointFailed
from agentrl.train.controller_client import ControllerClient, ControllerError
from agentrl.train.critic import Critic, ValueLearner
from agentrl.train.free_layers import choose
from agentrl.train.frozen_parts import freeze
from agentrl.train.learner import PolicyLearner
from agentrl.train.memory_saving import use_memory_saving_layers
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import (
    ModelRefused,
    Policy,
    check_model,
    checkpoint_layers,
    compile_layers,
    compute_in,
    load_model,
    shard,
)
from agentrl.train.publishing import make_publisher
from agentrl.train.rank import DTYPES, join_group, set_threads
from agentrl.train.routing_replay import keep_routers
from agentrl.train.row_attention import choose_attention, is_packed
from agentrl.train.sharded_loading import inside, load_sharded, loads_whole
from agentrl.train.trainer import Trainer, TrainingStopped
from agentrl.train.training_noise import remove_noise
from agentrl.train.trial_update import TrialBatch, trial_batch, trial_error, trial_without_logprobs
from agentrl.weights.gather import own_part


def build_trainer(
    recipe: Recipe, model_path: Path, run_dir: Path, device: torch.device, client: ControllerClient | None
) -> Trainer:
    """Builds this rank's trainer: loads and shards the models, and makes optimizer and publisher.

    The process group must be initialized already.
    """
    config = recipe.trainer
    mesh = RankMesh.of_world(device, mesh_shape(config, dist.get_world_size()))
    policy = make_policy(recipe, model_path, mesh, device)
    decided = with_attention(recipe, "packed" if is_packed(policy.model) else "padded")
    reference: nn.Module | None = None
    if config.kl_coef > 0 and config.lora_rank is None:
        reference = build_policy(decided, model_path, mesh, device)[0].requires_grad_(False)
    elif config.kl_coef > 0:
        from agentrl.train.lora import BasePolicy

        reference = BasePolicy(policy)
    publisher = make_publisher(recipe, policy, run_dir, device, client, mesh, model_path)
    critic = make_critic(decided, model_path, mesh, device) if config.advantage == "gae" else None
    engine = PolicyLearner(policy, reference, config, device, critic, mesh)
    if device.type == "cpu":
        learned = [*policy.parameters(), *(critic.critic.parameters() if critic is not None else ())]
        sizes = [own_part(p).numel() * p.element_size() for p in learned if p.requires_grad]
        take_memory(3 * sum(sizes))  # gradients, two moments
    made: type[Trainer] = load("trainer", config.type or "grpo")
    return made(recipe, model_path, run_dir, engine, publisher, client)


def with_attention(recipe: Recipe, attention: Literal["packed", "padded"]) -> Recipe:
    """Returns the recipe with a decided ``trainer.attention``."""
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"attention": attention})})


def load_for(recipe: Recipe, model_path: Path) -> Any:
    """Loads the starting model of the policy or the critic."""
    return load_model(
        model_path,
        gradient_checkpointing=recipe.trainer.gradient_checkpointing,
        context=recipe.inference.context_length,
        packed=prefers_packed(recipe),
        trust=recipe.model.trust_remote_code,
    )


def prefers_packed(recipe: Recipe) -> bool:
    """Whether packed rows are preferred to padded ones for a model that computes no prefix trees."""
    attention = recipe.trainer.attention
    return attention == "packed" or (attention == "auto" and recipe.launch.device == "cuda")


def without_trees(model: Any, why: str | None) -> None:
    """Has a model compute one sequence a row if there is a reason for it."""
    if why is not None:
        set_form(model, replace(form_of(model), way=Way("padded", why=why)))


def make_policy(recipe: Recipe, model_path: Path, mesh: RankMesh, device: torch.device) -> Policy:
    """Makes the starting policy, with LoRA adapters if the recipe trains adapters, and tries a first update.

    With ``trainer.attention=auto`` a model whose packed rows do not pass the trial gets padded rows, and one whose
    prefix trees do not pass it one sequence a row; the log says so.

    Raises:
        ModelRefused: The model cannot be trained.
    """
    dtype = DTYPES[recipe.trainer.dtype]
    policy, trial = build_policy(recipe, model_path, mesh, device)
    why = trial_error(policy, trial, device, dtype, mesh)
    packed_only = mesh.shape.context > 1
    if why is not None and recipe.trainer.attention == "auto" and is_packed(policy.model) and not packed_only:
        if dist.get_rank() == 0:
            name = type(policy.model).__name__
            print(f"trainer.attention=auto: {name} cannot use packed rows, its rows are padded: {why}", flush=True)
        del policy
        policy, trial = build_policy(with_attention(recipe, "padded"), model_path, mesh, device)
        why = trial_error(policy, trial, device, dtype, mesh)
    if why is not None and recipe.trainer.attention == "auto" and form_of(policy.model).way.rows == "trees":
        del policy
        policy, trial = build_policy(recipe, model_path, mesh, device, no_trees=why)
        why = trial_error(policy, trial, device, dtype, mesh)
    if why is not None:
        raise ModelRefused(f"{type(policy.model).__name__} cannot be trained: {why}{_way_out(policy.model, why)}")
    way = form_of(policy.model).way
    if way.rows != "trees" and dist.get_rank() == 0:
        print(f"the rows of {type(policy.model).__name__} are {way}", flush=True)
    return policy


def build_policy(
    recipe: Recipe, model_path: Path, mesh: RankMesh, device: torch.device, *, no_trees: str | None = None
) -> tuple[Policy, TrialBatch]:
    """Builds the starting policy, and a batch to try it on, computed with the model as it was loaded.

    Args:
        recipe: Resolved recipe.
        model_path: Folder of the model.
        mesh: Mesh of the ranks.
        device: Device of this rank.
        no_trees: Why the model's prefix trees are not used, although it was loaded for them.
    """
    config, temperature = recipe.trainer, recipe.sampling.temperature

    def wrap(model: Any) -> Policy:
        freeze(model, config.freeze)
        if config.lora_rank is not None:
            from agentrl.train.lora import add_adapter  # PEFT is an optional dependency

            add_adapter(model, config, seed=recipe.seed, base=recipe.model.name)
            if mesh.rank == 0 and (share := stacked_share(model)):
                print(f"trainer.lora_rank: the experts' stacked weights, {share:.0%} of the parameters, get no adapter "
                      "and stay as they are", flush=True)  # fmt: skip
        return Policy(model, temperature, config.logprob_chunk, config.router_aux_loss > 0)

    if (why := loads_whole(model_path, config, mesh)) is None:
        return build_sharded(recipe, model_path, mesh, device, wrap, no_trees=no_trees)
    if mesh.shape.tensor * mesh.shape.expert > 1:
        raise ModelRefused(f"trainer.tensor_parallel and expert_parallel split a model while it is loaded, but {why}")
    if mesh.rank == 0 and mesh.shape.size > 1:
        print(f"every rank loads the whole model before it is sharded: {why}", flush=True)
    model = load_for(recipe, model_path)
    without_trees(model, no_trees)
    if config.replay_routing:
        keep_routers(model)
    trial = trial_batch(model, temperature)
    choose_attention(model, config, device)
    require_packed(model, mesh)
    return prepared(wrap(model), config, mesh, device), trial


def build_sharded(
    recipe: Recipe,
    model_path: Path,
    mesh: RankMesh,
    device: torch.device,
    wrap: Callable[[Any], Any],
    *,
    head: bool = True,
    no_trees: str | None = None,
) -> tuple[Any, TrialBatch]:
    """Builds a policy or a critic of which each rank loads its own part, and a batch to try it on; a collective.

    Args:
        recipe: Resolved recipe.
        model_path: Folder of the starting model.
        mesh: Mesh of the ranks.
        device: Device of this rank.
        wrap: Function of the model that returns the policy or critic.
        head: Whether the model has its output head; a critic's has not.
        no_trees: Why the model's prefix trees are not used.
    """
    config = recipe.trainer

    def split(module: Any) -> None:
        choice = choose(config, module.parameters(), mesh, device)
        if mesh.rank == 0:
            print(f"{type(module).__name__} on {mesh.shape}. {choice.said}", flush=True)
        if not config.compile:
            use_memory_saving_layers(module.model, norms_only=mesh.shape.tensor > 1)
        shard(module, mesh.fsdp, DTYPES[config.dtype], free_layers=choice.frees)

    dtype, trust = DTYPES[config.dtype], recipe.model.trust_remote_code
    names, start = None, None
    if config.lora_rank is not None and head:
        from agentrl.train.lora import names_in_files, start_adapter

        names, start = names_in_files(model_path, config, trust=trust), start_adapter
    module = load_sharded(model_path, mesh, wrap, split, dtype, head=head, trust=trust, names=names)
    model, context, packed = module.model, recipe.inference.context_length, prefers_packed(recipe)
    if start is not None:
        start(model, seed=recipe.seed)

    def check() -> TrialBatch:
        if not head:
            remove_noise(model)
            set_form(model, ModelForm(find_way(model, context, packed=packed)))
            return trial_without_logprobs(model)
        check_model(model, context, packed=packed)
        if config.replay_routing:
            keep_routers(model)
        return trial_batch(model, recipe.sampling.temperature)

    trial = inside(module, check)
    without_trees(model, no_trees)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    choose_attention(model, config, device)
    require_packed(model, mesh)
    if config.compile:
        compile_layers(model)
    return module, trial


def require_packed(model: Any, mesh: RankMesh) -> None:
    """Refuses context parallelism for a model whose prefix trees cannot be packed, or have limited attention.

    Raises:
        ModelRefused: They cannot be shared.
    """
    way = form_of(model).way
    if mesh.shape.context > 1 and (way.rows != "trees" or any(reach.limited for reach in way.reaches.values())):
        raise ModelRefused(
            f"trainer.context_parallel={mesh.shape.context} shares the tokens of prefix trees whose layers attend "
            f"to the whole past, and those of {type(model).__name__} do not" + (f": {way.why}" if way.why else "")
        )
    if mesh.shape.context > 1 and not is_packed(model):
        raise ModelRefused(
            f"trainer.context_parallel={mesh.shape.context} shares the tokens of packed rows, and the attention of "
            f"{type(model).__name__} cannot be replaced, so its rows are padded"
        )


def _way_out(model: Any, why: str) -> str:
    if is_packed(model):
        return "; set trainer.attention=padded"
    return "; set trainer.dtype=float32 inference.dtype=float32" if "dtype" in why else ""


def make_critic(recipe: Recipe, model_path: Path, mesh: RankMesh, device: torch.device) -> ValueLearner:
    """Makes a critic that starts from the policy's decoder, and tries a first update.

    All its weights are trained, but those of the parts that ``trainer.freeze`` names.

    Raises:
        ModelRefused: The model cannot be trained as a critic.
    """
    config = recipe.trainer

    def wrap(model: Any) -> Critic:
        decoder = decoder_of(model)
        freeze(decoder, config.freeze)
        return Critic(decoder)

    if loads_whole(model_path, config, mesh) is None:
        critic, trial = build_sharded(recipe, model_path, mesh, device, wrap, head=False)
    else:
        model = load_for(recipe, model_path)
        trial = trial_batch(model, recipe.sampling.temperature)
        choose_attention(model, config, device)
        critic = prepared(wrap(model), config, mesh, device)
    decoder = critic.model
    if (why := trial_error(critic, trial, device, DTYPES[config.dtype], mesh)) is not None:
        raise ModelRefused(f"{type(decoder).__name__} cannot be trained as a critic: {why}{_way_out(decoder, why)}")
    return ValueLearner(critic, config, device, mesh)


def prepared(module: Any, config: TrainerConfig, mesh: RankMesh, device: torch.device) -> Any:
    """Moves a policy or a critic to its device, and shards and compiles it as the recipe says.

    A single rank is sharded with FSDP2 only for ``cpu_offload`` or for a compute dtype other than float32. For such a
    dtype on a CPU, without ``compile`` and ``gradient_checkpointing``, :func:`compute_in` makes fewer copies.
    """
    dtype = DTYPES[config.dtype]
    module.to(device)
    if not config.compile:
        use_memory_saving_layers(module.model)
    alone = mesh.shape.size == 1 and not config.cpu_offload
    if (
        alone
        and dtype != torch.float32
        and device.type == "cpu"
        and not (config.compile or config.gradient_checkpointing)
    ):
        compute_in(module, dtype)
    elif not alone or dtype != torch.float32:
        choice = choose(config, module.parameters(), mesh, device)
        if mesh.rank == 0 and mesh.shape.size > 1:
            print(f"{type(module).__name__} on {mesh.shape}. {choice.said}", flush=True)
        shard(module, mesh.fsdp, dtype, offload=config.cpu_offload, free_layers=choice.frees)
    if config.compile:
        compile_layers(module.model)
    return module


def take_memory(nbytes: int) -> None:
    """Lets the allocator take ``nbytes`` from the system while the first batch is sampled, and keep them.

    On a virtual machine the first access to a page can cost more than the arithmetic on it. The launcher's environment
    variables make the allocator keep freed memory.
    """
    torch.empty(nbytes // 4, dtype=torch.float32).zero_()


def main(argv: list[str] | None = None) -> int:
    """Runs one trainer rank and returns its exit status."""
    parser = run_arguments("agentrl.train")
    parser.add_argument("--controller", required=True)
    args = parser.parse_args(argv)
    begin()
    recipe = recipe_of_run(args.run_dir)
    set_threads(recipe)
    device = join_group(recipe)
    client = ControllerClient(args.controller, recipe.trainer.batch_timeout) if dist.get_rank() == 0 else None
    if client is not None:
        client.start_heartbeat()
    try:
        trainer = build_trainer(recipe, args.model, args.run_dir, device, client)
    except UserError as error:
        dist.destroy_process_group()
        return refuse(error)
    try:
        if args.resume:
            trainer.resume()
        trainer.run()
    except (ControllerError, TrainingStopped, CheckpointFailed) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(CheckpointFailed):  # the checkpoint before it stands
            trainer.saver.wait(END_SECONDS)
        trainer.publisher.close()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
