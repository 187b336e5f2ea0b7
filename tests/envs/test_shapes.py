"""Pictures of shapes: what is asked is in the picture, and answers are judged by it."""

from typing import Any

import pytest

from agentrl.config.errors import DataError
from agentrl.core.contract import checked_reset
from agentrl.core.images import image_bytes, images_of, opened
from agentrl.data.shapes import load
from agentrl.envs.shapes import BACKGROUND, COLORS, Shapes, draw

TASK = {
    "shapes": [[0, 0, "circle", "red"], [0, 1, "circle", "blue"], [1, 1, "triangle", "green"]],
    "grid": 2, "question": "How many circles are there?", "answer": "2",
}  # fmt: skip
COLOR = {**TASK, "question": "What color is the shape at the bottom right?", "answer": "green"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_the_picture_has_each_shape_in_its_cell() -> None:
    image = draw(TASK["shapes"], 2, 96)
    centers = {(0, 0): "red", (0, 1): "blue", (1, 1): "green"}
    for row in range(2):
        for column in range(2):
            name = centers.get((row, column))
            assert image.getpixel((column * 48 + 24, row * 48 + 26)) == (COLORS[name] if name else BACKGROUND)
    assert draw(TASK["shapes"], 2, 96).tobytes() == image.tobytes()
    square = draw([[0, 0, "square", "yellow"]], 1, 40)
    assert square.getpixel((7, 7)) == COLORS["yellow"], "a square fills its corners, a circle does not"
    assert draw([[0, 0, "circle", "yellow"]], 1, 40).getpixel((7, 7)) == BACKGROUND


async def test_the_observation_is_a_picture_and_a_question() -> None:
    env = Shapes(size=32)
    observation, _ = checked_reset(await env.reset(options=TASK), env)
    (url,) = images_of(observation[0])
    assert opened(image_bytes(url)).tobytes() == draw(TASK["shapes"], 2, 32).tobytes()
    assert observation[0]["content"][1]["text"].startswith("How many circles are there? Answer with one word")


@pytest.mark.parametrize(
    ("task", "answer", "reward"),
    [
        (TASK, "There are 2.", 1.0),
        (TASK, "3", 0.1),
        (TASK, "red", 0.0),
        (TASK, "", 0.0),
        (COLOR, "It is Green", 1.0),
        (COLOR, "blue", 0.1),
        (COLOR, "2", 0.0),
    ],
)
async def test_answers_are_judged_by_the_task(task: dict[str, Any], answer: str, reward: float) -> None:
    env = Shapes()
    await env.reset(options=task)
    _, earned, terminated, _, info = await env.step(said(answer))
    assert (earned, terminated) == (reward, True)
    assert info["metrics"] == {"accuracy": float(reward == 1), "format": float(reward > 0)}


@pytest.mark.parametrize(
    ("task", "answer", "reward"), [(TASK, "2 ", 1.0), (COLOR, "grxy", 1.0), (COLOR, "r", 0.1), (COLOR, "1", 0.0)]
)
async def test_short_answers_are_one_character(task: dict[str, Any], answer: str, reward: float) -> None:
    env = Shapes(short=True)
    await env.reset(options=task)
    assert (await env.step(said(answer)))[1] == reward


def test_lines_are_apart_and_right() -> None:
    train, about = load("train", None, train=300)
    test, _ = load("test", None, test=60)
    assert load("train", None, train=300)[0] == train and "2 x 2" in about
    assert not [line for line in test if line in train]
    for line in (*train, *test):
        if line["answer"].isdigit():
            kind = line["question"].split()[2].removesuffix("s")
            assert line["answer"] == str(sum(one[2] == kind for one in line["shapes"]))
        else:
            assert line["answer"] in COLORS and any(one[3] == line["answer"] for one in line["shapes"])
    assert {line["answer"].isdigit() for line in load("train", None, ask="color", train=20)[0]} == {False}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"split": "dev"}, "no split 'dev'"),
        ({"path": "x"}, "reads no path"),
        ({"ask": "size"}, "want count, color or both"),
        ({"grid": 1, "train": 4000}, "not 4000 different lines"),
        ({"grid": 0}, "want at least 1"),
    ],
)
def test_what_cannot_be_generated_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        load(**({"split": "train", "path": None} | given))


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"size": 4}, {"form_reward": 1.0}):
        with pytest.raises(ValueError, match="must lie in"):
            Shapes(**wrong)  # type: ignore[arg-type]
