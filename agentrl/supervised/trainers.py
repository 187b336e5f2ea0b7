"""TRL's SFT, reward and DPO trainers, set up from a recipe.

Guarantees: the ids that are trained on are those of :mod:`agentrl.supervised.tokens`, TRL encodes nothing again;
:class:`~agentrl.supervised.course.Course` decides a run's schedule, TRL's own schedules are switched off; parameters
are float32 in every compute dtype; the reward model, DPO's policy and its reference have no dropout, because their
losses compare two passes, while SFT keeps the dropout of the model's config; a mixture's load-balancing loss has the
recipe's coefficient, not the one of its config; TRL's logprobs are those of the model's own head. Sources: Ouyang et
al. 2022, arXiv:2203.02155 (SFT and reward model); Rafailov et al. 2023, arXiv:2305.18290 (DPO).
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from agentrl.config.recipe import Recipe
from agentrl.core.image_reader import has_image_class
from agentrl.core.model_files import Unreadable
from agentrl.models.loading import load_weights
from agentrl.models.probe import FAULTS
from agentrl.models.tree_support import ids_of
from agentrl.supervised.course import Course
from agentrl.train.policy import ModelRefused, load_config
from agentrl.train.router_balance import balancing_function
from agentrl.train.training_noise import remove_noise, without_noise

Columns = dict[str, list[Any]]
TRIED = 8  # tokens on which TRL's logprobs are compared with the model's own
EXACT = 1e-3  # largest mean difference, in nats


class OnCourse:
    """Mixin for a TRL trainer: the learning rate follows the run's :class:`Course`; no model card is written."""

    course: Course
    optimizer: Any
    lr_scheduler: Any

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Returns a scheduler with the course's learning rate factor."""
        if self.lr_scheduler is None:
            course = self.course
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: course.factor(step))
        return self.lr_scheduler

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: the run's folder describes the model."""


class SFT(OnCourse, SFTTrainer):
    """SFT trainer on the columns ``input_ids`` and ``labels``."""


class Reward(OnCourse, RewardTrainer):
    """Reward model trainer on the columns ``chosen_ids`` and ``rejected_ids``."""


class DPO(OnCourse, DPOTrainer):
    """DPO trainer on the columns ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset  # encoded already; this TRL trainer has no option to skip encoding


def sft(recipe: Recipe, model: Path, common: dict[str, Any], parts: dict[str, Any]) -> SFT:
    """Build the SFT trainer: mean cross-entropy over the tokens of the batch whose loss mask is set."""
    loaded = _causal(recipe, model, _config(recipe, model))
    args = SFTConfig(  # the labels hold the loss mask
        **common, completion_only_loss=False, router_aux_loss_coef=_balance(recipe, loaded)
    )
    trainer = SFT(model=loaded, args=args, **parts)
    _check_head(recipe, loaded)
    return trainer


def rm(recipe: Recipe, model: Path, common: dict[str, Any], parts: dict[str, Any]) -> Reward:
    """Build the reward model trainer (score at the last token): -log sigmoid(chosen score - rejected score)."""
    config = without_noise(_config(recipe, model))
    config.num_labels = 1
    scoring = _loaded(recipe, AutoModelForSequenceClassification, model, config, drawn=("score.", "classifier."))
    remove_noise(scoring)  # TRL sets dropout layers only, and not what attention and layer drop read
    return Reward(model=scoring, args=RewardConfig(**common), **parts)


def dpo(recipe: Recipe, model: Path, common: dict[str, Any], parts: dict[str, Any]) -> DPO:
    """Build the DPO trainer; the reference is a frozen copy of the starting model."""
    own = recipe.supervised
    policy, reference = _without_noise(recipe, model), _without_noise(recipe, model)
    args = DPOConfig(**common, beta=own.beta, loss_type=[own.loss_type], router_aux_loss_coef=_balance(recipe, policy))
    trainer = DPO(model=policy, ref_model=reference.requires_grad_(False), args=args, **parts)
    _check_head(recipe, policy)
    return trainer


def arguments(recipe: Recipe, output_dir: Path, *, micro: int, total_steps: int, bfloat16: bool) -> dict[str, Any]:
    """Returns the arguments that the three trainers have in common.

    Args:
        recipe: Resolved recipe.
        output_dir: Folder for checkpoints.
        micro: Examples per micro-batch of a rank.
        total_steps: Number of optimizer steps of the whole training.
        bfloat16: Whether to compute in bfloat16.
    """
    config = recipe.trainer
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": micro,
        "gradient_accumulation_steps": recipe.supervised.batch_size // (micro * config.ranks),
        "max_steps": total_steps,
        "max_length": None,  # longer examples were left out already
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "max_grad_norm": config.max_grad_norm,
        "bf16": bfloat16,
        "use_cpu": recipe.launch.device == "cpu",
        "gradient_checkpointing": config.gradient_checkpointing,
        "seed": recipe.seed,
        "logging_steps": 1,
        "save_strategy": "no",  # ``Course`` decides when to save and evaluate
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": recipe.launch.device != "cpu",
        "ddp_find_unused_parameters": False,
    }


def dataset(columns: Columns) -> Dataset:
    """Returns columns of token ids as a ``datasets.Dataset``."""
    return Dataset.from_dict(columns)


def _config(recipe: Recipe, model: Path) -> Any:
    config = load_config(model, trust=recipe.model.trust_remote_code)
    if has_image_class(config):
        raise ModelRefused(
            f"trainer.type={recipe.trainer.type}: of a {config.model_type!r} transformers has no class of its text "
            "alone, and supervised trainers learn from text: take a causal language model"
        )
    return config


def _balance(recipe: Recipe, model: Any) -> float:
    """Returns the coefficient of the load-balancing loss of a mixture: without one TRL takes that of its config.

    Raises:
        NoRouters: There is a coefficient, and the model has no such loss.
    """
    if recipe.trainer.router_aux_loss:
        balancing_function(model)
    return recipe.trainer.router_aux_loss


@torch.no_grad()
def _check_head(recipe: Recipe, model: Any) -> None:
    """Compares the logprobs that TRL computes with those of the model's own head, of which it knows some forms.

    Raises:
        ModelRefused: They differ, or TRL cannot compute them.
    """
    ids, was_training = torch.tensor([ids_of(model, TRIED)], device=model.device), model.training
    model.eval()
    try:
        rows = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0].float()
        gap = (found - rows.gather(-1, ids[0, 1:, None])[:, 0]).abs().mean().item()
        why = "" if gap <= EXACT else f"they differ by {gap:.2g} nats on average"
    except FAULTS as error:
        why = f"{type(error).__name__}: {error}"
    model.train(was_training)
    if why:
        raise ModelRefused(
            f"trainer.type={recipe.trainer.type}: TRL does not compute the logprobs of {type(model).__name__} as its "
            f"own output head does ({why}): take another model, or trainer.type=grpo"
        )


def _causal(recipe: Recipe, model: Path, config: Any) -> Any:
    return _loaded(recipe, AutoModelForCausalLM, model, config)


def _loaded(recipe: Recipe, kind: Any, model: Path, config: Any, **how: Any) -> Any:
    try:
        return load_weights(kind, model, config, trust=recipe.model.trust_remote_code, dtype=torch.float32, **how)
    except Unreadable as error:
        raise ModelRefused(f"the model cannot be trained: {error}") from error


def _without_noise(recipe: Recipe, model: Path) -> Any:
    loaded = _causal(recipe, model, without_noise(_config(recipe, model)))
    remove_noise(loaded)
    return loaded
