"""Entry point of a supervised training rank: ``torchrun -m agentrl.supervised --run-dir runs/x --model DIR``.

Guarantees: SIGTERM ends the rank at once; the same held-out examples are measured before and after the
training; the export comes last, so a folder ``model/`` means that the training was completed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run
from agentrl.config.recipe import Recipe
from agentrl.core.registry import load
from agentrl.host.entry import begin, refuse, run_arguments
from agentrl.host.process import write_json
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.observe.sinks import MetricsWriter
from agentrl.supervised.batches import EncodedExamples, encode_all, even_batch, micro_batch, pad_token, step_count
from agentrl.supervised.checkpoint import Checkpoints, barrier, export, sweep_unfinished
from agentrl.supervised.course import Course
from agentrl.supervised.records import Records
from agentrl.supervised.trainers import arguments, dataset
from agentrl.train.checkpoint_state import CHAT_TEMPLATE, latest_checkpoint, read_state, why_over
from agentrl.train.policy import load_config
from agentrl.train.rank import DTYPES, set_threads


def main(argv: list[str] | None = None) -> int:
    """Run one rank."""
    parser = run_arguments("agentrl.supervised")
    parser.add_argument("--ready-file", type=Path, required=True)
    args = parser.parse_args(argv)
    begin()
    recipe = recipe_of_run(args.run_dir)
    set_threads(recipe)  # the process group is made by accelerate
    disable_progress_bar()
    try:
        learn(recipe, args.run_dir, args.model, args.ready_file, resume=args.resume)
    except (UserError, TemplateError) as error:
        return refuse(error)
    return 0


def learn(recipe: Recipe, run_dir: Path, model: Path, ready_file: Path, *, resume: bool) -> None:
    """Train on the recipe's examples and export the model to ``model/``."""
    template = ChatTemplate.from_folder(
        model,
        source=recipe.model.chat_template,
        policy="append",
        variables=recipe.inference.chat_template_kwargs,
        trust=recipe.model.trust_remote_code,
    )
    examples = encode_all(recipe, template)
    tokenizer: Any = template.tokenizer
    if recipe.trainer.type == "rm":
        tokenizer.pad_token = pad_token(template, examples)
    found = latest_checkpoint(run_dir / "checkpoints") if resume else None
    state = read_state(found) if found else {"step": 0, "elapsed": 0.0}
    course = Course(recipe, *step_count(recipe, len(examples.train)), state["elapsed"])
    trainer = build(recipe, run_dir, model, examples, tokenizer, course)
    first = trainer.is_world_process_zero()
    writer = MetricsWriter(run_dir, tensorboard=recipe.logging.tensorboard) if first else None
    if writer is not None:
        sweep_unfinished(run_dir / "checkpoints")
        writer.void_after(state["step"])
        write_json(ready_file, {"data": examples.summary(recipe)})
        trainer.add_callback(Records(writer.write, course, examples.held_out_count, recipe.trainer.type == "dpo"))
    if examples.held_out is not None and found is None:
        trainer.evaluate()
    if found is not None and why_over(recipe, state) is not None:  # transformers would make one more step
        trainer._load_from_checkpoint(str(found))
    else:
        trainer.train(resume_from_checkpoint=str(found) if found else None)
    if examples.held_out is not None:
        trainer.evaluate()
    if writer is not None:
        writer.close()
        step, trust = max(trainer.state.global_step, state["step"]), recipe.model.trust_remote_code
        _export(trainer, tokenizer, run_dir, model, step, trust)
    barrier()


def build(recipe: Recipe, run_dir: Path, model: Path, examples: EncodedExamples, tokenizer: Any, course: Course) -> Any:
    """Build the TRL trainer of ``trainer.type`` for the encoded examples, with the run's schedule and checkpoints."""
    config = recipe.trainer
    set_seed(recipe.seed)  # a reward model's head begins with random numbers
    checkpoints = run_dir / "checkpoints"
    micro = micro_batch(recipe, examples.train.longest)
    bfloat16 = DTYPES[config.dtype] == torch.bfloat16
    common = arguments(recipe, checkpoints, micro=micro, total_steps=course.total_steps, bfloat16=bfloat16)
    parts: dict[str, Any] = {"train_dataset": dataset(examples.train.data), "processing_class": tokenizer}
    if examples.held_out is not None:
        common["per_device_eval_batch_size"] = even_batch(len(examples.held_out) // config.ranks, micro)
        parts["eval_dataset"] = dataset(examples.held_out.data)
    trainer = load("trainer", str(config.type))(recipe, model, common, parts)
    trainer.course = course
    trainer.remove_callback(PrinterCallback)  # metrics.jsonl has the same numbers
    trainer.add_callback(course)
    trainer.add_callback(Checkpoints(checkpoints, config.keep_checkpoints, course))
    return trainer


def _export(trainer: Any, tokenizer: Any, run_dir: Path, model: Path, step: int, trust: bool) -> None:
    """Write ``model/`` in the dtype of the starting model."""
    template = run_dir / CHAT_TEMPLATE
    if template.is_file():  # the template used in training replaces the tokenizer's own
        tokenizer.chat_template = template.read_text()
    start: Any = load_config(model, trust=trust, weights=False)
    learned = trainer.accelerator.unwrap_model(trainer.model)
    learned.config.use_cache = start.use_cache  # training switches the cache off
    own, given = (one.get_text_config(decoder=True) for one in (learned.config, start))
    for name in ("output_router_logits", "router_aux_loss_coef"):  # TRL sets both
        if hasattr(given, name):
            setattr(own, name, getattr(given, name))
    export(learned, tokenizer, run_dir / "model", start.dtype or torch.float32, step)


if __name__ == "__main__":
    sys.exit(main())
