"""Teaches the tiny vision model to see a little, so that rewards alone can teach it more: the start of a learning test.

``python -m tests.sight FOLDER`` writes the model and prints what it answers right of the held-out pictures, beside the
best answers of a player without eyes.
"""

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from agentrl.core.image_reader import copy_processor
from agentrl.core.images import image_bytes, images_of
from agentrl.core.message_shape import in_shape
from agentrl.data.shapes import load
from agentrl.envs.shapes import Shapes
from agentrl.inference.template import ChatTemplate
from agentrl.models.pixels import embedded_as, pixels_of
from agentrl.train.policy import load_model
from tests.tiny_vision import build_tiny_vision

SIZE = 16  # pixels: one feature of the model for each cell of the picture
ENOUGH = 0.65  # share of right answers at which teaching ends: above blind, and far from all
STEPS, ROWS, RATE, EVERY = 1500, 32, 2e-3, 50
Line = dict[str, Any]


def blind(lines: list[Line]) -> float:
    """Share of right answers of the best player who reads the questions and sees no picture."""
    answers: dict[str, Counter[str]] = {}
    for line in lines:
        answers.setdefault(line["question"], Counter())[line["answer"]] += 1
    return sum(max(counts.values()) for counts in answers.values()) / len(lines)


class Lesson:
    """Questions about pictures as the shipped environment asks them, for a model and its template.

    Args:
        folder: Folder of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)
        self._template, self._env = ChatTemplate.from_folder(folder), Shapes(size=SIZE, short=True)

    def logits(self, lines: list[Line]) -> torch.Tensor:
        """``[lines, vocabulary]`` logits of the first token of the answers."""
        pixels, rows, images = pixels_of(self.model), [], []
        assert pixels is not None
        for line in lines:
            messages = [in_shape(one, images=True) for one in self._env.prompt(line)]
            rows.append(self._template.first(messages))
            images += [image_bytes(url) for one in messages for url in images_of(one)]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
        arguments = pixels.arguments(tokens, torch.ones_like(tokens, dtype=torch.bool), images)
        with embedded_as(self.model, tokens, arguments) as inputs:
            found = self.model(use_cache=False, **inputs).logits
        return found[torch.arange(len(rows)), torch.tensor(list(map(len, rows))) - 1]

    def answers(self, lines: list[Line]) -> torch.Tensor:
        """``[lines]`` ids of the right answers: the first letter of a color."""
        return torch.tensor([self._template.encode(line["answer"][:1])[0] for line in lines])

    @torch.no_grad()
    def share_right(self, lines: list[Line]) -> float:
        """Share of right answers among greedy ones."""
        return (self.logits(lines).argmax(-1) == self.answers(lines)).float().mean().item()


def teach(folder: Path, *, seed: int = 0) -> tuple[float, float]:
    """Writes a model that sees a little.

    Returns:
        Its share of right answers about the held-out pictures, and that of the best player without eyes.
    """
    start = build_tiny_vision(folder / "start", seed=seed)
    lesson, rng = Lesson(start), random.Random(seed)
    lines, held_out = (load(split, None, ask="color")[0] for split in ("train", "test"))
    optimizer, right = torch.optim.AdamW(lesson.model.parameters(), lr=RATE, weight_decay=0.0), 0.0
    for step in range(1, STEPS + 1):
        some = rng.sample(lines, ROWS)
        loss = cross_entropy(lesson.logits(some), lesson.answers(some))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lesson.model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0:
            right = lesson.share_right(rng.sample(lines, 200))
            print(f"step {step}: loss {loss.item():.3f}, right {right:.0%}", flush=True)
            if right >= ENOUGH:
                break
    for file in start.iterdir():  # tokenizer and template; the weights follow
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    copy_processor(start, folder)
    lesson.model.save_pretrained(folder)
    return lesson.share_right(held_out), blind(held_out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = teach(Path(sys.argv[1]))
    print(f"{found[0]:.1%} right, {found[1]:.1%} without eyes")
