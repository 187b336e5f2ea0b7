"""Images in messages: every shape comes out as one, and what is no image is refused with the reason."""

import base64
from pathlib import Path

import pytest

from agentrl.core.images import ImageError, data_url, image_bytes, images_of, opened, shown_text, text_of, url_of
from agentrl.core.message_shape import MessageError, in_shape
from tests.tiny_vision import picture


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a b.png"
    picture().save(path)
    return path


def test_every_shape_of_an_image_comes_out_as_the_same_part(file: Path) -> None:
    url = data_url(file)
    parts = [
        {"type": "image_url", "image_url": {"url": str(file)}},
        {"type": "image_url", "image_url": {"url": file.as_uri(), "detail": "low"}},
        {"type": "image_url", "image_url": str(file)},
        {"type": "image", "image": picture()},
        {"type": "image", "image": file},
        {"type": "image", "path": str(file)},
        {"type": "image_url", "image_url": {"url": picture()}},
        {"type": "input_image", "image_url": url},
    ]
    for part in parts:
        content = ["What ", {"type": "text", "text": "is it? "}, part]
        shaped = in_shape({"role": "user", "content": content}, images=True)
        assert shaped["content"][0] == {"type": "text", "text": "What is it? "}
        (found,) = images_of(shaped)
        assert opened(image_bytes(found)).tobytes() == picture().tobytes()
        assert in_shape(shaped, images=True) == shaped


def test_the_bytes_of_a_file_stay_as_they_are(file: Path) -> None:
    assert image_bytes(data_url(str(file))) == file.read_bytes()
    assert url_of(file.read_bytes()) == data_url(file)


def test_a_content_without_an_image_stays_a_text() -> None:
    shaped = in_shape({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, images=True)
    assert shaped == {"role": "user", "content": "ab"}


def test_the_text_of_a_content_with_images() -> None:
    parts = ["a", {"type": "image", "image": picture()}, "b"]
    content = in_shape({"role": "tool", "content": parts}, images=True)["content"]
    assert (text_of(content), shown_text(content), shown_text("a")) == ("ab", "a[image]b", "a")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("https://example.com/a.png", "not fetched over a network: download https://example.com/a.png"),
        ("no/such/file.png", "the image no/such/file.png cannot be read: No such file"),
        ("data:text/plain;base64,YQ==", "is no image"),
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png;base64," + base64.b64encode(b"GIVEN").decode(), "no PNG, JPEG, WebP, GIF or BMP"),
        ("data:image/png,abc", "no data URL"),
        ("", "must be a path"),
        (7, "must be a path"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(given: object, why: str) -> None:
    with pytest.raises(MessageError, match=f"the user message: .*{why}"):
        in_shape({"role": "user", "content": [{"type": "image_url", "image_url": {"url": given}}]}, images=True)


def test_a_text_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(ImageError, match=r"a\.png.*no PNG"):
        data_url(tmp_path / "a.png")


def test_a_broken_image_is_refused_when_it_is_decoded(file: Path) -> None:
    with pytest.raises(ImageError, match="cannot be decoded"):
        opened(file.read_bytes()[:60])


def test_an_assistant_shows_no_images() -> None:
    with pytest.raises(MessageError, match="a policy writes text alone"):
        in_shape({"role": "assistant", "content": [{"type": "image", "image": picture()}]}, images=True)


def test_where_no_images_are_taken_they_are_refused_as_before() -> None:
    with pytest.raises(MessageError, match="models here read text alone"):
        in_shape({"role": "user", "content": [{"type": "image", "image": picture()}]})
