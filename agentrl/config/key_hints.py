"""Guesses which recipe key a user means by an unknown one.

Guarantees: a guess is a key that holds a value, never a section, unless the unknown key is itself a misspelled section;
a name that other toolkits use is known before spelling is compared.
"""

from collections.abc import Sequence

from agentrl.core.registry import closest

SYNONYMS = {  # last part of a key, as TRL, verl, OpenRLHF, prime-rl and others call it
    "rollout.group_size": "n num_generations n_samples_per_prompt rollouts_per_example num_samples rollout_n "
    "samples_per_prompt",
    "rollout.batch_size": "bs batch train_batch_size per_device_train_batch_size rollout_batch_size",
    "rollout.max_staleness": "staleness max_async_level async_level off_policy_steps",
    "rollout.max_concurrent": "concurrency max_concurrency",
    "sampling.max_new_tokens": "max_tokens max_completion_length max_response_length max_completion_tokens "
    "response_length generate_max_len max_output_tokens",
    "sampling.temperature": "temp",
    "trainer.learning_rate": "lr actor_learning_rate",
    "trainer.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "trainer.warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "trainer.weight_decay": "wd",
    "trainer.max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clipping max_norm",
    "trainer.total_steps": "steps max_steps num_steps total_training_steps train_steps num_train_steps",
    "trainer.epochs": "num_epochs num_train_epochs total_epochs max_epochs",
    "trainer.nproc": "gpus num_gpus n_gpus gpu world_size nproc_per_node n_gpus_per_node num_processes ranks",
    "trainer.replicas": "dp_replicate dp_replicate_size data_parallel_replicate_degree hsdp num_replicas",
    "trainer.context_parallel": "cp cp_size context_parallel_size context_parallel_degree "
    "ulysses_sequence_parallel_size sequence_parallel sequence_parallel_size",
    "trainer.tensor_parallel": "tp tensor_parallel_degree",
    "trainer.expert_parallel": "ep expert_parallel_degree expert_model_parallel_size",
    "trainer.kl_coef": "kl kl_beta kl_loss_coef init_kl_coef kl_penalty kl_coeff",
    "trainer.clip_eps": "clip clip_range cliprange epsilon clip_ratio eps_clip clip_ratio_low clip_eps_low",
    "trainer.clip_eps_high": "epsilon_high clip_ratio_high",
    "trainer.entropy_coef": "entropy entropy_coeff ent_coef",
    "trainer.lora_rank": "lora lora_r r",
    "trainer.advantage": "adv_estimator advantage_estimator estimator",
    "trainer.preset": "algorithm algo",
    "trainer.objective": "loss loss_fn policy_loss",
    "trainer.dtype": "precision bf16 fp16",
    "trainer.tokens_per_microbatch": "micro_batch_size micro_train_batch_size gradient_accumulation_steps "
    "ppo_micro_batch_size",
    "trainer.minibatches": "num_minibatches ppo_mini_batch_size mini_batch_size",
    "trainer.save_every": "save_steps save_freq save_interval ckpt_every checkpoint_every",
    "eval.every": "eval_every eval_steps eval_interval test_freq",
    "eval.tasks": "num_examples eval_tasks",
    "inference.context_length": "max_len max_seq_len max_model_len max_seq_length max_sequence_length seq_len "
    "context_len context_window",
    "inference.engine": "backend inference_engine",
    "inference.urls": "url base_url server_url",
    "inference.servers": "num_servers workers num_workers num_engines",
    "inference.tp": "tensor_parallel_size tp_size tensor_model_parallel_size",
    "inference.pp": "pipeline_parallel_size pp_size",
    "inference.dp": "data_parallel_size dp_size",
    "inference.ep": "expert_parallel_size ep_size",
    "allocation": "allocation_mode alloc_mode",
    "model.name": "model_name model_path model_name_or_path pretrain",
    "env.id": "env_id env_name environment",
    "agent.id": "agent_id agent_name",
    "train_dataset.name": "dataset dataset_name train_data train_files",
    "launch.run_dir": "output_dir out_dir save_dir ckpt_dir",
    "name": "run_name experiment_name exp_name",
}
_IN_SECTION = {  # where a section gives a name another meaning
    "trainer.beta": "trainer.kl_coef",
    "eval.n": "eval.tasks",
    "eval.k": "eval.samples",
    "model.path": "model.name",
    "model.id": "model.name",
    "sampling.n": "rollout.group_size",
    "rollout.group": "rollout.group_size",
    "env.name": "env.id",
    "agent.name": "agent.id",
}
_MEANT = {word: key for key, words in SYNONYMS.items() for word in words.split()}


def meant_key(key: str, known: Sequence[str]) -> str | None:
    """Returns the known key that an unknown one probably means, or ``None``.

    Args:
        key: The unknown dotted key.
        known: All dotted keys, sections included.
    """
    section, _, last = key.rpartition(".")
    sections = {one.rpartition(".")[0] for one in known} - {""}
    values = [one for one in known if one not in sections]
    same = [one for one in values if one.rpartition(".")[2] == last]
    mapping = closest(section, [one for one in values if one.endswith(".kwargs")], cutoff=0.9)
    if key in _IN_SECTION:
        return _IN_SECTION[key]
    if mapping is not None:
        return f"{mapping}.{last}"
    if len(same) == 1:
        return same[0]
    if last in _MEANT:
        return _MEANT[last]
    if section in sections:
        inside = [one for one in values if one.rpartition(".")[0] == section]
        return _within(last, inside) or _within(last, values)
    if same:
        return closest(key, same) or same[0]
    near = closest(section, sorted(sections)) if section else None
    if near is not None:
        return _within(last, [one for one in values if one.startswith(f"{near}.")]) or near
    below = [one for one in sections if one.rpartition(".")[2] == last]
    return _within(last, values) or closest(key, known) or next(iter(below), None)


def _within(last: str, keys: Sequence[str]) -> str | None:
    """Finds the key whose last part begins with, abbreviates or resembles ``last``."""
    by_last = {key.rpartition(".")[2]: key for key in keys}
    begun = [name for name in by_last if name.startswith(last)]
    initials = [name for name in by_last if "".join(word[0] for word in name.split("_")) == last]
    if len(last) > 1 and len(begun) == 1:
        return by_last[begun[0]]
    if len(initials) == 1:
        return by_last[initials[0]]
    near = closest(last, list(by_last), cutoff=0.7)
    if near is not None:
        return by_last[near]
    parts = [name for name in by_last if last in name.split("_")]
    return by_last[parts[0]] if len(parts) == 1 else None
