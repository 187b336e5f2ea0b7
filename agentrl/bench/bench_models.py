"""Compares plain rows, one sequence each, with a padding-free row of TRL's trainer that holds the same tokens.

Guarantees: both sides compute the loss of all tokens of the same 8 sequences and its gradients, on the same model, with
the same dtype (by default bfloat16 over float32 parameters if the CPU has it, else float32), in one process,
interleaved. A Llama would be computed as prefix trees; here it is made to take plain rows, as models that cannot do.
"""

import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.bench.report import default_model

if TYPE_CHECKING:
    from agentrl.models.way import Rows

SEQUENCES, TOKENS = 8, (150, 280)
BUDGET = 2300  # tokens of a micro-batch: all sequences, padded
CHUNK = 256


def run(model: str | None = None, repeats: int = 5, dtype: str = "auto") -> dict[str, list[float]]:
    """Measure ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Number of interleaved measurements, after one that warms up.
        dtype: ``float32``, ``bfloat16`` or ``auto``.

    Returns:
        ``plain_vs_trl`` and ``packed_vs_trl``, seconds of padded plain rows, and of rows packed end to end, over those
        of TRL's row, and the seconds.
    """
    import torch
    from transformers import AutoConfig

    from agentrl.host.compute_dtype import resolved_dtype

    torch.set_flush_denormal(True)  # as a trainer does
    path, computed = model or default_model(), resolved_dtype(dtype, "cpu")
    rng, ids = random.Random(0), min(40_000, AutoConfig.from_pretrained(path).vocab_size)
    sequences = [
        [rng.randrange(min(100, ids // 2), ids) for _ in range(rng.randint(*TOKENS))] for _ in range(SEQUENCES)
    ]
    sides = {
        "plain_s": _ours(path, sequences, computed, "padded"),
        "packed_s": _ours(path, sequences, computed, "packed"),
        "trl_s": _theirs(path, sequences, computed),
    }
    figures: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        took = {name: _seconds(step) for name, step in sides.items()}
        ratios = {f"{side}_vs_trl": took[f"{side}_s"] / took["trl_s"] for side in ("plain", "packed")}
        if repeat:
            for key, value in {**ratios, **took}.items():
                figures.setdefault(key, []).append(value)
    return figures


def _seconds(step: Any) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def _ours(path: str, sequences: list[list[int]], dtype: str, rows: "Rows") -> Any:
    """Makes a function that computes the loss of all tokens in plain rows, and its gradients."""
    import torch

    from agentrl.bench.made_batch import TrainSequence, made_tokens
    from agentrl.models.way import ModelForm, Way, set_form
    from agentrl.train.layout import collate
    from agentrl.train.layout_choice import layout_of
    from agentrl.train.memory_saving import use_memory_saving_layers
    from agentrl.train.policy import Policy, compute_in, load_model

    loaded = load_model(Path(path))
    set_form(loaded, ModelForm(Way(rows, why="it is measured")))
    use_memory_saving_layers(loaded)
    policy, layout = Policy(loaded, 1.0, CHUNK), layout_of(loaded)
    policy.train()
    if dtype != "float32":
        compute_in(policy, getattr(torch, dtype))
    made = [TrainSequence(ids, [0] + [1] * (len(ids) - 1), [0.0] * len(ids)) for ids in sequences]
    branches, tokens = made_tokens(made)

    def step() -> None:
        for rows in layout.plan(layout.rows(branches, tokens, BUDGET), 1, BUDGET)[0]:
            batch = collate(rows, branches, tokens, layout, torch.device("cpu"))
            policy(batch, lambda chosen, logprobs, entropies: -logprobs.mean()).backward()
        policy.zero_grad(set_to_none=False)

    return step


def _theirs(path: str, sequences: list[list[int]], dtype: str) -> Any:
    """Makes a function that runs TRL's training step over the sequences in one padding-free row."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=SEQUENCES, padding_free=True, max_length=None,
        use_cpu=True, bf16=dtype == "bfloat16", gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in sequences])
    trainer: Any = SFTTrainer(model=path, args=arguments, train_dataset=data)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # which `train` would set
    model = trainer.accelerator.prepare_model(trainer.model).train()

    def step() -> None:
        batch = trainer.data_collator([{"input_ids": list(ids), "labels": list(ids)} for ids in sequences])
        trainer.training_step(model, batch)
        model.zero_grad(set_to_none=False)

    return step
