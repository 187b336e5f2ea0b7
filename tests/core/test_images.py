"""Images in messages: every shape comes out as one, and what is no image is refused with the reason."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

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


@pytest.mark.parametrize("key", ["max_pixels", "resized_height"])
def test_a_size_that_would_not_be_kept_is_refused(file: Path, key: str) -> None:
    """qwen_vl_utils reads such keys, and the model would see another number of tokens than its author meant."""
    part = {"type": "image", "image": str(file), key: None}
    assert in_shape({"role": "user", "content": [part]}, images=True)
    with pytest.raises(MessageError, match=f"the user message: {key} of a part is not read here.*resize the image"):
        in_shape({"role": "user", "content": [part | {key: 3136}]}, images=True)


def test_a_text_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(ImageError, match=r"a\.png.*no PNG"):
        data_url(tmp_path / "a.png")


def saved(image: Any, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def ramp(mode: str, most: int) -> Any:
    """An image of 5 x 1 pixels, from black to white."""
    image = Image.new(mode, (5, 1))
    for x in range(5):
        image.putpixel((x, 0), most * x // 4)
    return image


def turned(orientation: int) -> dict[str, Any]:
    """EXIF data of a camera that was held otherwise."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


def palette() -> Any:
    image = Image.new("P", (4, 2))
    image.putpalette([10, 20, 30, 255, 0, 0])
    return image


GLASS = Image.new("RGBA", (4, 2), (200, 0, 0, 0))  # color that nobody sees
SEEN = {
    "transparent": (saved(GLASS), (4, 2), (255, 255, 255)),
    "half transparent": (saved(Image.new("RGBA", (4, 2), (0, 0, 0, 128))), (4, 2), (127, 127, 127)),
    "gray and transparent": (saved(Image.new("LA", (4, 2), (7, 0))), (4, 2), (255, 255, 255)),
    "palette and transparent": (saved(palette(), transparency=0), (4, 2), (255, 255, 255)),
    "transparent GIF": (saved(palette(), "GIF", transparency=0), (4, 2), (255, 255, 255)),
    "transparent WebP": (saved(GLASS, "WEBP", lossless=True), (4, 2), (255, 255, 255)),
    "turned JPEG": (saved(Image.new("RGB", (4, 2), (9, 9, 9)), "JPEG", **turned(6)), (2, 4), (9, 9, 9)),
    "turned PNG": (saved(Image.new("RGB", (4, 2), (9, 9, 9)), **turned(8)), (2, 4), (9, 9, 9)),
    "four inks": (saved(Image.new("CMYK", (4, 2), (0, 0, 0, 0)), "JPEG"), (4, 2), (255, 255, 255)),
}


@pytest.mark.parametrize("name", SEEN)
def test_an_image_is_sent_as_a_person_sees_it(name: str) -> None:
    file, size, color = SEEN[name]
    for given in (url_of(file), Image.open(io.BytesIO(file))):
        url = data_url(given)
        sent = Image.open(io.BytesIO(image_bytes(url)))  # as a server that knows no more decodes it
        assert (sent.mode, sent.size, sent.getpixel((1, 1))) == ("RGB", size, color)
        assert sent.getexif().get(0x0112, 1) == 1
        assert data_url(url) == url
    assert opened(file).tobytes() == sent.tobytes()


def test_a_turned_photo_has_its_top_on_top() -> None:
    photo = Image.new("RGB", (8, 4), (0, 0, 0))
    photo.paste((255, 255, 255), (0, 0, 2, 4))  # the left edge of what the sensor saw
    upright = opened(image_bytes(data_url(url_of(saved(photo, **turned(6))))))
    assert upright.size == (4, 8) and upright.getpixel((2, 0)) == (255, 255, 255) != upright.getpixel((2, 7))


@pytest.mark.parametrize(("mode", "most"), [("I;16", 65535), ("I", 65535), ("I", 255), ("L", 255)])
def test_gray_images_of_8_and_16_bits_look_alike(mode: str, most: int) -> None:
    found = opened(image_bytes(data_url(ramp(mode, most))))
    assert [found.getpixel((x, 0)) for x in range(5)] == [(255 * x // 4,) * 3 for x in range(5)]
    file = opened(image_bytes(data_url(url_of(saved(ramp("I;16", 65535))))))
    assert file.tobytes() == found.tobytes()


def test_files_that_all_decoders_read_alike_keep_their_bytes() -> None:
    plain = [
        saved(picture()),
        saved(picture(), "JPEG"),
        saved(picture().convert("L")),
        saved(palette()),
        saved(palette(), "GIF"),
    ]
    for file in plain:
        assert image_bytes(data_url(url_of(file))) == file


def test_the_kind_that_a_url_tells_is_that_of_its_bytes() -> None:
    text = base64.b64encode(saved(picture())).decode()
    assert (
        data_url(f"data:image/tiff;base64,{text}") == data_url(f"data:image/jpeg;base64,{text}") == data_url(picture())
    )


@pytest.mark.parametrize(
    ("mode", "most", "why"), [("F", 1, "says not which value is white"), ("I", 70000, "values from 0 to 70000")]
)
def test_values_of_no_known_range_are_refused(mode: str, most: int, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        data_url(ramp(mode, most))


def test_a_broken_image_is_refused_when_it_is_decoded(file: Path) -> None:
    with pytest.raises(ImageError, match="cannot be decoded"):
        opened(file.read_bytes()[:60])


def test_an_assistant_shows_no_images() -> None:
    with pytest.raises(MessageError, match="a policy writes text alone"):
        in_shape({"role": "assistant", "content": [{"type": "image", "image": picture()}]}, images=True)


def test_where_no_images_are_taken_they_are_refused_as_before() -> None:
    with pytest.raises(MessageError, match="models here read text alone"):
        in_shape({"role": "user", "content": [{"type": "image", "image": picture()}]})
