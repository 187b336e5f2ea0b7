"""Tries a model as the trainer would, without a process group, and says what came of it.

Guarantees: the way, the head and the layout are those of a run with ``trainer.attention=auto`` on this device; the
logprobs of a small group are compared with the model's own forward pass over each sequence alone, in float32.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from agentrl.config.recipe import TrainerConfig
from agentrl.models.own_head import HeadForm
from agentrl.models.probe import FAULTS
from agentrl.models.way import Way, form_of, set_form
from agentrl.train.layout import collate
from agentrl.train.layout_choice import layout_of
from agentrl.train.policy import ModelRefused, Policy, compute_in, load_model
from agentrl.train.row_attention import choose_attention, is_packed
from agentrl.train.trial_update import TOLERANCE, TrialBatch, trial_batch

CHUNK = 64  # tokens whose logits exist at one time


@dataclass(frozen=True)
class TrainerProbe:
    """Verdict of the trainer on a model.

    Attributes:
        way: Way in which the model computes several sequences.
        end_to_end: Whether the rows of prefix trees lie end to end, with sparse attention.
        head: Form of the output head.
        gaps: Mean difference of a logprob from the model's own forward pass in float32, in nats, by compute dtype.
        fault: Error of its code in bfloat16, for which ``gaps`` has no number then; empty if there is none.
        lora_targets: Names of the linear layers that can get adapters.
        tensor_parallel: Whether the class has a plan for tensor parallelism.
    """

    way: Way
    end_to_end: bool
    head: HeadForm
    gaps: dict[str, float]
    fault: str
    lora_targets: tuple[str, ...]
    tensor_parallel: bool


def probe_trainer(folder: Path, context: int, *, trust: bool = False) -> TrainerProbe:
    """Tries a model as the trainer would.

    Args:
        folder: Folder of the model, with weights.
        context: Longest sequence in tokens.
        trust: Whether code that comes with the model may run.

    Raises:
        ModelRefused: The model cannot be trained.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    how: dict[str, Any] = {"context": context, "packed": device.type == "cuda", "trust": trust}
    why = ""
    tried: list[tuple[Literal["auto", "padded"], bool]] = [("auto", True), ("padded", True), ("padded", False)]
    for attention, trees in tried:  # as a run falls back
        model = load_model(folder, **how)
        if not trees:
            set_form(model, replace(form_of(model), way=Way("padded", why=why)))
        trial = trial_batch(model, 1.0)
        choose_attention(model, TrainerConfig(attention=attention), device)
        model.to(device).train()
        try:
            gaps = {"float32": _gap(model, trial, device, torch.float32)}
        except FAULTS as error:
            why = f"its rows cannot be computed ({type(error).__name__}: {error})"
            continue
        if gaps["float32"] <= TOLERANCE[torch.float32]:
            fault = ""
            try:
                gaps["bfloat16"] = _gap(model, trial, device, torch.bfloat16)
            except FAULTS as error:  # code that mixes dtypes
                fault = f"{type(error).__name__}: {error}"
            form, plan = form_of(model), getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
            return TrainerProbe(form.way, is_packed(model), form.head, gaps, fault, linear_layers(model), bool(plan))
        why = f"its logprobs differ from the plain model's by {gaps['float32']:.2g} nats on average"
    raise ModelRefused(f"the model in {folder} cannot be trained: {why}")


def _gap(model: Any, trial: TrialBatch, device: torch.device, dtype: torch.dtype) -> float:
    """Computes the mean difference of a policy's logprobs from the plain model's in float32, in nats."""
    policy = Policy(model, 1.0, CHUNK)
    if dtype != torch.float32:
        compute_in(policy, dtype)
    layout = layout_of(model)
    rows = layout.rows(trial.branches, trial.tokens, 4096)
    batch = collate(rows, trial.branches, trial.tokens, layout, device)
    with torch.no_grad():
        found = policy(batch)[0].float().cpu()
    return (found - trial.expected[batch.places.cpu()]).abs().mean().item()


def linear_layers(model: Any) -> tuple[str, ...]:
    """Returns the last parts of the names of a model's linear layers, without embeddings and output head."""
    kept = (model.get_output_embeddings(), model.get_input_embeddings())
    linear = (nn.Linear, Conv1D)
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, linear) and not any(module is one for one in kept)
    }
    return tuple(sorted(found))
