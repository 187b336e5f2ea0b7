"""Videos in messages: frames in every form come out as one, and what is no video is refused with what to do."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.core.contract import checked_reset
from agentrl.core.images import image_bytes, images_of, shown_text
from agentrl.core.message_shape import MessageError, in_shape
from agentrl.core.videos import frames_of, is_video
from tests.tiny_vision import picture

FRAMES = [picture(1), picture(1), picture(2)]  # two are the same: none of them is left out


def saying(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "What happens?"}, part]}


def pixels(frames: list[Any]) -> list[bytes]:
    return [frame.tobytes() for frame in frames]


def test_frames_in_every_form_come_out_as_the_same_part(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(len(FRAMES))]
    for file, frame in zip(files, FRAMES, strict=True):
        frame.save(file)
    parts = [
        {"type": "video", "video": FRAMES},
        {"type": "video", "video": tuple(files)},
        {"type": "video_url", "video_url": {"url": list(map(str, files))}},
        {"type": "input_video", "input_video": [FRAMES[0], files[1], files[2].as_uri()]},
    ]
    for part in parts:
        shaped = in_shape(saying(part), images=True)
        assert shaped["content"][0] == {"type": "text", "text": "What happens?"}
        (found,) = images_of(shaped)
        assert is_video(image_bytes(found)) and pixels(frames_of(image_bytes(found))) == pixels(FRAMES)
        assert in_shape(shaped, images=True) == shaped
        assert shown_text(shaped["content"]) == "What happens?[video]"


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_an_animated_file_is_a_video(kind: str, tmp_path: Path) -> None:
    file, shades = tmp_path / f"a.{kind}", [10, 90, 200]
    from PIL import Image

    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in shades]
    frames[0].save(file, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "webp" else {}))
    (found,) = images_of(in_shape(saying({"type": "video", "video": file}), images=True))
    assert [frame.getpixel((3, 3)) for frame in frames_of(image_bytes(found))] == [(shade, 0, 0) for shade in shades]


def test_frames_in_an_observation_become_data() -> None:
    (message,), _ = checked_reset(([saying({"type": "video", "video": FRAMES})], {}), object())
    (found,) = images_of(message)
    assert pixels(frames_of(image_bytes(found))) == pixels(FRAMES)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Path("a.mp4"), "animated GIF, WebP or PNG; take the frames out of any other: the image a.mp4 cannot be read"),
        ("data:video/mp4;base64,AAAA", "take the frames out of any other: 'data:video/mp4;base64,AAAA' is no image"),
        ([picture()], "a video has 2 to 1024 frames, got 1; show a single one as an image"),
        ([picture(), picture(1, 8, 8)], r"one size, got \[\(8, 8\), \(32, 24\)\]"),
        ([picture(), 7], "an image must be a path"),
        (None, "a video must be a list of its frames"),
    ],
)
def test_what_is_no_video_is_refused_with_what_to_do(given: Any, why: str) -> None:
    with pytest.raises(MessageError, match=why) as found:
        in_shape(saying({"type": "video", "video": given}), images=True)
    assert "\n" not in str(found.value)


def test_a_text_model_refuses_a_video_in_one_line_before_it_is_opened() -> None:
    with pytest.raises(MessageError) as found:
        in_shape(saying({"type": "video", "video": Path("/nowhere/a.mp4")}))
    holds = "the user message holds a video (a part of type 'video')"
    assert str(found.value) == f"{holds}: models here read text alone, so describe it in words"


def test_an_assistant_shows_no_video() -> None:
    with pytest.raises(MessageError, match="holds a video, and a policy writes text alone"):
        in_shape({"role": "assistant", "content": [{"type": "video", "video": FRAMES}]}, images=True)


def test_frames_are_no_image(tmp_path: Path) -> None:
    FRAMES[0].save(tmp_path / "a.tif")
    with pytest.raises(MessageError, match="a TIFF, which only a video may be"):
        in_shape(saying({"type": "image", "path": str(tmp_path / "a.tif")}), images=True)
