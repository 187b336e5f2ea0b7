"""Questions about a picture of colored shapes: how many of a kind there are, or the color at a place.

Guarantees: the picture is drawn from the task alone, so the same task gives the same pixels; accuracy is 1 if and only
if the answer is right; an answer of the asked kind earns ``form_reward`` even if it is wrong, and never more than a
right one. Pillow draws; it is imported when a picture is drawn.
"""

import re
from typing import TYPE_CHECKING, Any

from agentrl import Message, SingleTurnEnvironment

if TYPE_CHECKING:
    from PIL.Image import Image

COLORS = {"red": (214, 40, 40), "green": (34, 139, 34), "blue": (40, 80, 220), "yellow": (245, 200, 20)}
BACKGROUND = (255, 255, 255)
MARGIN = 0.15  # of a cell, around its shape
WORDS = re.compile(r"[a-z]+|\d+")


class Shapes(SingleTurnEnvironment):
    """Shows a picture of shapes on a grid and asks about it.

    A task is ``{"shapes": [[row, column, kind, color], ...], "grid": int, "question": str, "answer": str}``.

    Args:
        size: Width and height of the picture in pixels.
        short: Whether to ask for one character: the digit, or the first letter of the color. It is what a very small
            model can learn to write.
        form_reward: Reward of a wrong answer of the asked kind: a number, or the name of a color.
    """

    dataset = "shapes"
    columns = ("question", "answer")
    reward_range = (0.0, 1.0)

    def __init__(self, size: int = 96, short: bool = False, form_reward: float = 0.1) -> None:
        if size < 8 or not 0 <= form_reward < 1:
            raise ValueError(f"size={size} must be at least 8 and form_reward={form_reward} must lie in [0, 1)")
        super().__init__()
        self.size = size
        self.short = short
        self.form_reward = form_reward

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Returns the picture and the question."""
        how = "Answer with one character." if self.short else "Answer with one word or number."
        if self.short and not task["answer"].isdigit():
            how = "Answer with the first letter of its name."
        parts = [
            {"type": "image", "image": draw(task["shapes"], task["grid"], self.size)},
            {"type": "text", "text": f"{task['question']} {how}"},
        ]
        return [{"role": "user", "content": parts}]

    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Returns 1 for the right answer, ``form_reward`` for another one of its kind, else 0."""
        said, wanted = self._said(answer), task["answer"][:1] if self.short else task["answer"]
        kinds = {name[:1] for name in COLORS} if self.short else set(COLORS)
        fits = said.isdigit() if wanted.isdigit() else said in kinds
        accuracy = float(said == wanted)
        return accuracy or self.form_reward * fits, {"accuracy": accuracy, "format": float(fits)}

    def extract(self, answer: str) -> str | None:
        """Returns what was answered, for votes."""
        return self._said(answer) or None

    def _said(self, answer: str) -> str:
        """Returns the first character of an answer, or its last word or number."""
        text = answer.strip().lower()
        if self.short:
            return text[:1]
        words = WORDS.findall(text)
        return words[-1] if words else ""


def draw(shapes: list[list[Any]], grid: int, size: int) -> "Image":
    """Draws shapes on a grid.

    Args:
        shapes: ``[row, column, kind, color]`` of each.
        grid: Number of rows and of columns.
        size: Width and height in pixels.
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size, size), BACKGROUND)
    pen, cell = ImageDraw.Draw(image), size / grid
    for row, column, kind, color in shapes:
        left, top = (column + MARGIN) * cell, (row + MARGIN) * cell
        right, bottom = (column + 1 - MARGIN) * cell, (row + 1 - MARGIN) * cell
        fill = COLORS[color]
        if kind == "circle":
            pen.ellipse((left, top, right, bottom), fill=fill)
        elif kind == "square":
            pen.rectangle((left, top, right, bottom), fill=fill)
        else:
            pen.polygon(((left + right) / 2, top, right, bottom, left, bottom), fill=fill)
    return image
