"""Sessions with images: placeholders in the ledger as the model's own processor makes them, images beside the ids."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.core.columns import Columns, concatenate, split
from agentrl.core.episode import Episode, StopReason
from agentrl.core.image_reader import ImageReader, PromptImage
from agentrl.core.images import data_url, image_bytes
from agentrl.core.message_shape import MessageError
from agentrl.inference.backend import InferenceError, SamplingParams
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.inference.kinds.sglang import SGLangBackend
from agentrl.inference.kinds.vllm import VLLMBackend
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.rollout.buffer import Group
from agentrl.rollout.group_account import Tally
from agentrl.rollout.held_groups import pack, unpack
from agentrl.rollout.teacher_scoring import score_trajectory
from agentrl.rollout.worker_wire import Ended, ended_from_bytes, ended_to_bytes, packed
from tests.inference.fakes import FakeBackend, answer
from tests.tiny import build_tiny_tokenizer
from tests.tiny_vision import build_tiny_vision, picture

SETTINGS = SessionSettings(SamplingParams(max_new_tokens=20), 500, locked=True, model="m")


def asking(text: str, *images: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": one} for one in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def template(tiny_vision: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_vision)


def session_of(template: ChatTemplate, said: str = "a") -> ChatSession:
    ids = template.tokenizer.encode(said, add_special_tokens=False)
    return ChatSession(FakeBackend(lambda prompt, params: answer([*ids, template.eos_id])), template, SETTINGS)


def processed(folder: Path, text: str, images: list[Any]) -> list[int]:
    """Ids of a rendered text with images, as the model's own processor makes them."""
    reader, why = ImageReader.find(folder)
    assert reader is not None, why
    return reader._processor(text=[text], images=[images] if "idefics" in str(folder) else images)["input_ids"][0]


async def test_the_ledger_holds_the_placeholders_of_the_models_own_processor(
    template: ChatTemplate, tiny_vision: Path
) -> None:
    session = session_of(template)
    images = [picture(1), picture(2, 20, 30)]
    await session.create(messages=[{"role": "system", "content": "see"}, asking("what?", *images)])
    parts = [*[{"type": "image"}] * 2, {"type": "text", "text": "what?"}]
    shown = template.render([{"role": "system", "content": "see"}, {"role": "user", "content": parts}], generation=True)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    ((sent, params),) = backend.requests
    assert sent == processed(tiny_vision, shown, images)
    assert not any(session.trajectory.nodes[1].loss_mask) and session.trajectory.nodes[1].token_ids == sent
    assert template.shown.reader is not None
    token = template.shown.reader.token_id
    places = [at for at, one in enumerate(sent) if one == token]
    first, second = params.images
    assert (first.start, second.end) == (places[0], places[-1] + 1) and first.end <= second.start
    assert [one.url for one in params.images] == [data_url(one) for one in images]
    assert session.drift() is not None and not session.drift().special  # type: ignore[union-attr]


async def test_images_of_later_turns_come_behind_those_of_earlier_ones(template: ChatTemplate) -> None:
    session = session_of(template)
    history: list[Any] = [asking("first?", picture(1))]
    for seed in (2, 3):
        reply = await session.create(messages=history)
        history += [{"role": "assistant", "content": reply.choices[0].message.content}, asking("next?", picture(seed))]
    await session.create(messages=history)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    sent, params = backend.requests[-1]
    assert [one.url for one in params.images] == [data_url(picture(seed)) for seed in (1, 2, 3)]
    assert template.shown.reader is not None
    for image in params.images:
        assert sent[image.start] == sent[image.end - 1] == template.shown.reader.token_id
    assert sent[: len(backend.requests[0][0])] == backend.requests[0][0]
    assert backend.requests[0][1].images == params.images[:1]
    drift = session.drift()
    assert drift is not None and not drift.special and drift.text == 0


async def test_a_conversation_without_images_sends_none(template: ChatTemplate) -> None:
    session = session_of(template)
    await session.create(messages=[{"role": "user", "content": "hello"}])
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    ((sent, params),) = backend.requests
    assert params.images == () and template.text(sent, special=True).count("hello") == 1


async def test_a_text_that_holds_the_placeholder_is_refused(template: ChatTemplate) -> None:
    assert template.shown.reader is not None
    with pytest.raises(TemplateError, match=r"holds the image placeholder .* 1 times, and its messages hold 0 images"):
        await session_of(template).create(messages=[{"role": "user", "content": f"see {template.shown.reader.token}"}])


async def test_an_image_that_the_processor_does_not_take_is_refused_with_its_size(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(build_tiny_vision(tmp_path))
    with pytest.raises(TemplateError, match=r"Qwen2VLProcessor takes no image of 300 x 1 pixels: .*aspect ratio"):
        await session_of(template).create(messages=[asking("what?", picture(0, 300, 1))])


async def test_a_text_model_refuses_an_image_with_one_line(tiny_model: Path) -> None:
    session = session_of(ChatTemplate.from_folder(tiny_model))
    why = "the user message holds a part of type 'image': models here read text alone"
    with pytest.raises(MessageError, match=why) as found:
        await session.create(messages=[asking("what?", picture())])
    assert "\n" not in str(found.value)


async def test_a_kind_of_server_without_images_refuses_them(tiny_vision: Path) -> None:
    template = ChatTemplate.from_folder(tiny_vision)
    template.shown.refuse("servers of the kind inference.engine=mine take no images beside ids")
    with pytest.raises(MessageError, match=r"inference\.engine=mine take no images"):
        await session_of(template).create(messages=[asking("what?", picture())])


async def episode_of(template: ChatTemplate, *seeds: int) -> Episode:
    session = session_of(template)
    history: list[Any] = [{"role": "system", "content": "see"}]
    for seed in seeds:
        reply = await session.create(messages=[*history, asking("what?", picture(seed))])
        history += [asking("what?", picture(seed)), {"role": "assistant", "content": reply.choices[0].message.content}]
    return Episode(
        group_id="g", task_id="t", index=0, seed=0, reward=1.0, stop_reason=StopReason.TERMINATED,
        trajectories={"assistant": session.trajectory},
    )  # fmt: skip


async def test_columns_carry_each_image_once_through_every_way(template: ChatTemplate) -> None:
    columns = Columns.of([await episode_of(template, 1, 2), await episode_of(template, 1)])
    files = [image_bytes(data_url(picture(seed))) for seed in (1, 2)]
    assert sorted(columns.images.values()) == sorted(files)
    expected = {1: (files[0],), 3: (files[1],), 6: (files[0],)}  # behind each answer stands the next prompt
    assert columns.message_images() == expected
    again, _ = Columns.from_bytes(columns.to_bytes())
    assert (again.images, again.message_images()) == (columns.images, expected)
    first, second = split(columns)
    assert list(second.images.values()) == files[:1] and second.message_images() == {1: (files[0],)}
    assert concatenate([first, second]).message_images() == expected
    assert list(columns.select([False, True]).images.values()) == files[:1]


async def test_images_come_through_a_checkpoint_and_from_a_worker(template: ChatTemplate) -> None:
    """Members whose tools showed other pictures, and groups that share one."""
    episodes = [await episode_of(template, 1, 2), await episode_of(template, 3), await episode_of(template, 1)]
    groups = [Group(0, Columns.of(episodes[:2]), Tally("kept")), Group(1, Columns.of(episodes[2:]), Tally("kept"))]
    assert any(groups[0].columns.images)
    held, _ = unpack(pack(groups, {}))
    delivered, _ = ended_from_bytes(ended_to_bytes([Ended(i, packed(one)) for i, one in enumerate(episodes)]))
    sent = [one.parts["columns"] for one in delivered if one.parts is not None]
    assert len(held) == 2 and len(sent) == 3
    for found, wanted in [
        *zip([one.columns for one in held], [one.columns for one in groups], strict=True),
        *zip(sent, [Columns.of([one]) for one in episodes], strict=True),
    ]:
        assert found.images == wanted.images and found.message_images() == wanted.message_images()


async def test_a_teacher_that_sees_no_images_refuses_to_score(template: ChatTemplate) -> None:
    episode = await episode_of(template, 1)
    with pytest.raises(InferenceError, match="a teacher scores token ids alone, and the messages hold images"):
        await score_trajectory(episode.trajectories["assistant"], None)  # type: ignore[arg-type]


class _Http:
    """Keeps what is posted, and answers from a table."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.posted = answers, []

    async def post(self, path: str, body: Any, **_: Any) -> Any:
        self.posted.append((path, body))
        return self.answers[path]

    async def get(self, path: str, **_: Any) -> Any:
        return self.answers[path]


IMAGE = PromptImage(data_url(picture()), 1, 3)
PARAMS = SamplingParams(max_new_tokens=2, images=(IMAGE,))


def said(prompt: int) -> dict[str, Any]:
    meta = {"output_token_logprobs": [[-1.0, 5, None]], "finish_reason": {"type": "stop"}, "prompt_tokens": prompt}
    return {"meta_info": meta}


async def test_sglang_gets_the_images_beside_the_ids() -> None:
    backend = SGLangBackend("http://s", 1.0)
    backend._http = http = _Http({"/generate": said(4)})  # type: ignore[assignment]
    await backend.generate([7, 9, 9, 8], PARAMS, request_id="r")
    ((_, body),) = http.posted
    assert body["image_data"] == [IMAGE.url] and "image_places" not in body
    assert body["input_ids"] == [7, 9, 8], "it expands a placeholder itself"


async def test_sglang_gets_one_placeholder_for_each_image_also_where_rows_are_separated() -> None:
    backend = SGLangBackend("http://s", 1.0)
    backend._http = http = _Http({"/generate": said(10)})  # type: ignore[assignment]
    images = (PromptImage(IMAGE.url, 1, 3), PromptImage(IMAGE.url, 4, 9))
    await backend.generate([7, 9, 9, 6, 3, 9, 9, 9, 3, 8], replace(PARAMS, images=images), request_id="r")
    assert http.posted[0][1]["input_ids"] == [7, 9, 6, 9, 8]
    await backend.generate([7, 9, 9], replace(PARAMS, images=()), request_id="r")
    assert http.posted[1][1]["input_ids"] == [7, 9, 9]


async def test_a_placeholder_that_was_sampled_is_refused_before_sglang_waits_for_its_image() -> None:
    backend = SGLangBackend("http://s", 1.0)
    backend._http = http = _Http({"/generate": said(5)})  # type: ignore[assignment]
    with pytest.raises(InferenceError, match="holds 2 placeholders for 1 images"):
        await backend.generate([7, 9, 9, 8, 9], PARAMS, request_id="r")
    assert not http.posted


async def test_a_server_that_expands_images_otherwise_is_refused() -> None:
    backend = SGLangBackend("http://s", 1.0)
    backend._http = _Http({"/generate": said(6)})  # type: ignore[assignment]
    with pytest.raises(InferenceError, match="read a prompt of 6 tokens where 4 were sent"):
        await backend.generate([7, 9, 9, 8], PARAMS, request_id="r")


async def test_the_embedded_engine_gets_the_places_too() -> None:
    backend = EmbeddedBackend("http://s", 1.0)
    backend._http = http = _Http({"/generate": said(4)})  # type: ignore[assignment]
    await backend.generate([7, 9, 9, 8], PARAMS, request_id="r")
    assert http.posted[0][1]["image_places"] == [[1, 3]] and http.posted[0][1]["input_ids"] == [7, 9, 9, 8]
    await backend.generate([7], replace(PARAMS, images=()), request_id="r")
    assert not {"image_data", "image_places"} & http.posted[1][1].keys()


def rendered(length: int) -> dict[str, Any]:
    features = {"mm_hashes": {"image": ["h"]}, "kwargs_data": {"image": ["x"]}}
    return {"token_ids": [1], "features": features | {"mm_placeholders": {"image": [{"offset": 9, "length": length}]}}}


async def test_vllm_gets_the_features_that_it_made_at_our_places() -> None:
    backend = VLLMBackend("http://s", 1.0)
    choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
    spans = {"weight_versions": [{"version": "0", "start": 0, "end": 1}]}
    answers = {
        "/v1/models": {"data": [{"id": "m"}]},
        "/v1/chat/completions/render": rendered(2),
        "/inference/v1/generate": {"choices": [choice | spans]},
    }
    backend._http = http = _Http(answers)  # type: ignore[assignment]
    await backend.generate([7, 9, 9, 8], PARAMS, request_id="r")
    (_, asked), (_, body) = http.posted
    assert asked["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": IMAGE.url}}]
    assert body["token_ids"] == [7, 9, 9, 8]
    assert body["features"]["mm_placeholders"] == {"image": [{"offset": 1, "length": 2}]}
    assert body["features"]["kwargs_data"] == {"image": ["x"]}
    http.answers["/v1/chat/completions/render"] = rendered(3)
    with pytest.raises(InferenceError, match=r"images of \[3\] placeholders, want \[2\]"):
        await backend.generate([7, 9, 9, 8], PARAMS, request_id="r")


def test_a_processor_needs_no_torchvision(tiny_vision: Path) -> None:
    reader, _ = ImageReader.find(tiny_vision)
    assert reader is not None
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_vision))
    assert reader.token_id == tokenizer.convert_tokens_to_ids(reader.token)
    assert reader.plain == ("idefics" not in str(tiny_vision))
    count = reader.placeholders(data_url(picture())).count(reader.token)
    assert count == (20 if "idefics" in str(tiny_vision) else 12)


def refusal(folder: Path) -> str:
    reader, why = ImageReader.find(folder)
    assert reader is None and "\n" not in why
    return why


def test_a_processor_that_lacks_a_package_or_does_not_tell_its_placeholders_is_told_in_one_line(tmp_path: Path) -> None:
    """Mistral 3's processor cannot be imported without torchvision; the model trains on texts all the same."""
    build_tiny_tokenizer(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Idefics2ImageProcessor"}')
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Idefics2Processor", "image_seq_len": 4}')
    (tmp_path / "config.json").write_text('{"model_type": "idefics2"}')
    assert "Idefics2Processor does not tell what stands for an image" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral3"}')
    if importlib.util.find_spec("torchvision") is None:
        assert "cannot be loaded (ImportError: PixtralProcessor requires the Torchvision library" in refusal(tmp_path)
        assert ChatTemplate.from_folder(tmp_path).first([{"role": "user", "content": "a"}])
