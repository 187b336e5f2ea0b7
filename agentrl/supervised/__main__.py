"""Entry point of a rank that learns from lines: ``torchrun -m agentrl.supervised --run-dir runs/x --model DIR``.

Guarantees: SIGTERM ends the rank at once; the held-out lines are measured before and after the training, on the same
lines; the export comes last, so a folder ``model/`` is of a training that went to its end.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PrinterCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run
from agentrl.config.recipe import Recipe
from agentrl.core.registry import load
from agentrl.host.entry import begin, run_arguments
from agentrl.host.process import write_json
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.observe.sinks import MetricsWriter
from agentrl.supervised.batches import Lines, encode_all, even_batch, micro_batch, pad_token, step_count
from agentrl.supervised.checkpoint import Checkpoints, barrier, export, sweep_unfinished
from agentrl.supervised.course import Course
from agentrl.supervised.records import Records
from agentrl.supervised.trainers import arguments, dataset
from agentrl.train.checkpoint_state import CHAT_TEMPLATE, latest_checkpoint, read_state
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
        print(error, file=sys.stderr)
        return 1
    return 0


def learn(recipe: Recipe, run_dir: Path, model: Path, ready_file: Path, *, resume: bool) -> None:
    """Learn from the recipe's lines and leave ``model/``."""
    template = ChatTemplate.from_folder(
        model, source=recipe.model.chat_template, policy="append", variables=recipe.inference.chat_template_kwargs
    )
    lines = encode_all(recipe, template)
    tokenizer: Any = template.tokenizer
    if recipe.trainer.type == "rm":
        tokenizer.pad_token = pad_token(template, lines)
    found = latest_checkpoint(run_dir / "checkpoints") if resume else None
    state = read_state(found) if found else {"step": 0, "elapsed": 0.0}
    course = Course(recipe, *step_count(recipe, len(lines.train)), state["elapsed"])
    trainer = build(recipe, run_dir, model, lines, tokenizer, course)
    first = trainer.is_world_process_zero()
    writer = MetricsWriter(run_dir, tensorboard=recipe.logging.tensorboard) if first else None
    if writer is not None:
        sweep_unfinished(run_dir / "checkpoints")
        writer.void_after(state["step"])
        write_json(ready_file, {"data": lines.told(recipe)})
        trainer.add_callback(Records(writer.write, course, lines.held_out_count, recipe.trainer.type == "dpo"))
    if lines.held_out is not None and found is None:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=str(found) if found else None)
    if lines.held_out is not None:
        trainer.evaluate()
    if writer is not None:
        writer.close()
        _export(trainer, tokenizer, run_dir, model)
    barrier()


def build(recipe: Recipe, run_dir: Path, model: Path, lines: Lines, tokenizer: Any, course: Course) -> Any:
    """The TRL trainer of ``trainer.type`` on the encoded lines, with the run's course and checkpoints."""
    config = recipe.trainer
    set_seed(recipe.seed)  # a reward model's head begins with random numbers
    checkpoints = run_dir / "checkpoints"
    micro = micro_batch(recipe, lines.train.longest)
    bfloat16 = DTYPES[config.dtype] == torch.bfloat16
    common = arguments(recipe, checkpoints, micro=micro, total_steps=course.total_steps, bfloat16=bfloat16)
    parts: dict[str, Any] = {"train_dataset": dataset(lines.train.data), "processing_class": tokenizer}
    if lines.held_out is not None:
        common["per_device_eval_batch_size"] = even_batch(len(lines.held_out) // config.nproc, micro)
        parts["eval_dataset"] = dataset(lines.held_out.data)
    trainer = load("trainer", str(config.type))(recipe, model, common, parts)
    trainer.course = course
    trainer.remove_callback(PrinterCallback)  # metrics.jsonl has all of it
    trainer.add_callback(course)
    trainer.add_callback(Checkpoints(checkpoints, config.keep_checkpoints, course))
    return trainer


def _export(trainer: Any, tokenizer: Any, run_dir: Path, model: Path) -> None:
    """``model/`` in the type of the model that the training started from."""
    template = run_dir / CHAT_TEMPLATE
    if template.is_file():  # not the model's own: what it learned with belongs to it from now on
        tokenizer.chat_template = template.read_text()
    start: Any = AutoConfig.from_pretrained(str(model))
    learned = trainer.accelerator.unwrap_model(trainer.model)
    learned.config.use_cache = start.use_cache  # training goes without
    export(learned, tokenizer, run_dir / "model", start.dtype or torch.float32)


if __name__ == "__main__":
    sys.exit(main())
