"""Toy lines, and runs that learn from them through the real command line."""

import json
from pathlib import Path
from typing import Any

from agentrl import SingleTurnEnvironment

LETTERS = "abcdefgh"


class Say(SingleTurnEnvironment):
    """Puts a line's prompt, and judges the answer by its completion."""

    def prompt(self, task):
        """The line's own."""
        return [{"role": "user", "content": task["prompt"]}]

    def judge(self, task, answer):
        """Right or wrong."""
        right = float(answer == task["completion"])
        return right, {"accuracy": right}


def write_lines(folder: Path) -> Path:
    """Lines that serve all three trainers: say a letter thrice, not z."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 64), ("test", 16)):
        lines: list[dict[str, Any]] = []
        for index in range(count):
            letter = LETTERS[index % len(LETTERS)]
            right = letter * 3
            texts = {"prompt": f"Say {letter}.", "completion": right, "chosen": right, "rejected": "zzz"}
            lines.append(texts)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def settings(model: Path, run_dir: Path, name: str, lines: Path, *more: str) -> list[str]:
    """A run of the tiny model on the lines of a folder, in the shipped recipes' place."""
    return [
        f"name={name}",
        f"launch.run_dir={run_dir}",
        "launch.device=cpu",
        f"model.name={model}",
        "train_dataset.name=env",
        f"train_dataset.path={lines}",
        "valid_dataset.name=env",
        f"valid_dataset.path={lines}",
        "supervised.evaluate=false",
        "supervised.batch_size=8",
        "supervised.max_length=128",
        "trainer.dtype=float32",
        "trainer.threads=1",
        "trainer.learning_rate=1e-2",
        "trainer.schedule=constant",
        "trainer.warmup_steps=0",
        "trainer.total_steps=6",
        *more,
    ]
