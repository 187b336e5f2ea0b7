"""Tries a model as the trainer would, without a process group, and says what came of it.

Guarantees: the way, the head and the layout are those of a run with ``trainer.attention=auto`` on this device; the
logprobs of a small group are compared with the model's own forward pass over each sequence alone, in float32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from agentrl.config.recipe import TrainerConfig
from agentrl.models.own_head import HeadForm
from agentrl.models.way import Way, form_of
from agentrl.train.layout import collate, layout_of
from agentrl.train.policy import Policy, compute_in, load_model
from agentrl.train.row_attention import choose_attention, is_packed
from agentrl.train.trial_update import trial_batch

CHUNK = 64  # tokens whose logits exist at one time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainerProbe:
    """What the trainer makes of a model.

    Attributes:
        way: How it computes several sequences.
        end_to_end: Whether the rows of prefix trees lie end to end, with sparse attention.
        head: Form of the output head.
        gaps: Mean difference of a logprob from the model's own forward pass in float32, in nats, by compute dtype.
        lora_targets: Names of the linear layers that can get adapters.
        tensor_parallel: Whether the class has a plan for tensor parallelism.
    """

    way: Way
    end_to_end: bool
    head: HeadForm
    gaps: dict[str, float]
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
    model = load_model(folder, context=context, packed=device.type == "cuda", trust=trust)
    gaps: dict[str, float] = {}
    targets, plan = linear_layers(model), bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None))
    form, trial = form_of(model), trial_batch(model, 1.0)
    choose_attention(model, TrainerConfig(), device)
    model.to(device).train()
    for name, dtype in DTYPES.items():
        policy = Policy(model, 1.0, CHUNK)
        if dtype != torch.float32:
            compute_in(policy, dtype)
        layout = layout_of(model)
        rows = layout.rows(trial.branches, trial.tokens, 4096)
        batch = collate(rows, trial.branches, trial.tokens, layout, device)
        with torch.no_grad():
            found = policy(batch)[0].float().cpu()
        gaps[name] = (found - trial.expected[batch.places.cpu()]).abs().mean().item()
    return TrainerProbe(form.way, is_packed(model), form.head, gaps, targets, plan)


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
