"""Videos end to end: the processor's placeholders in the ledger, the embedded engine, columns, the trainer.

The reference is transformers' own: the whole processor on the rendered conversation, and the model's forward pass and
`generate` with what it makes. It needs torchvision, which the extras do not bring: `make test-videos`. What is refused
without it does not.
"""

import asyncio
import importlib.util
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from agentrl.config.load import load_recipe
from agentrl.core.columns import Columns
from agentrl.core.image_reader import ImageReader
from agentrl.core.images import images_of
from agentrl.core.message_shape import ImageRefused, in_shape
from agentrl.engine.engine import Engine
from agentrl.engine.make_runner import make_runner
from agentrl.engine.model import load_model as load_served
from agentrl.engine.params import SamplingParams
from agentrl.inference.backend import SamplingParams as Asked
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.inference.template import ChatTemplate
from agentrl.launch.resolve import resolve
from agentrl.rollout.assemble import make_settings
from agentrl.train.layout_choice import layout_of
from agentrl.train.policy import Policy, load_model
from tests.engine.driving import SECONDS, Driver
from tests.served import served
from tests.tiny_vision import build_tiny_vision, picture
from tests.train.test_images import (
    CHUNK,
    EXACT,
    TEMPERATURE,
    batch_of,
    episode_of,
    gradients,
    play,
    same,
    updated_alike,
)

HERE = importlib.util.find_spec("torchvision") is not None
needs_torchvision = pytest.mark.skipif(not HERE, reason="they need torchvision: make test runs them once more, with it")
SERVED = 1e-4  # largest difference of a logprob of the engine in nats, in float32
Message = dict[str, Any]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models; the second has a frame's time before its placeholders."""
    return build_tiny_vision(tmp_path_factory.mktemp(request.param), request.param)


def timed(model: Path) -> bool:
    """Whether the frames' times are in a prompt."""
    return "qwen3" in model.name


@pytest.fixture(scope="module")
def template(model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(model)


def film(seed: int, frames: int = 4, width: int = 24) -> list[Any]:
    return [picture(seed + number, width, 16) for number in range(frames)]


def asking(text: str, *shown: Any) -> Message:
    """A message of films (lists of frames) and images, in order, and a text."""
    kinds = ["video" if isinstance(one, list) else "image" for one in shown]
    parts = [{"type": kind, kind: one} for kind, one in zip(kinds, shown, strict=True)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


SHOWN = ([film(1)], [film(5)], [film(1, 5, 16), picture(9, 16, 16)], [picture(8, 16, 16), film(3), film(4, 2, 16)], [])


@pytest.fixture(scope="module")
def processor(model: Path, template: ChatTemplate) -> Any:
    """The whole processor of transformers."""
    from transformers import AutoImageProcessor, AutoTokenizer, AutoVideoProcessor, Qwen2VLProcessor, Qwen3VLProcessor

    parts = [kind.from_pretrained(model) for kind in (AutoImageProcessor, AutoTokenizer, AutoVideoProcessor)]
    return (Qwen3VLProcessor if timed(model) else Qwen2VLProcessor)(*parts)


def own_arguments(processor: Any, text: str, shown: list[Any]) -> dict[str, Tensor]:
    """Output of the whole processor for a rendered prompt."""
    images, films = [one for one in shown if not isinstance(one, list)], [one for one in shown if isinstance(one, list)]
    how: dict[str, Any] = {"images": images or None, "videos": films or None, "do_sample_frames": False}
    made = processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **how)
    return {name: value for name, value in made.items() if name != "attention_mask"}


def rendered(template: ChatTemplate, message: Message) -> str:
    """The prompt's text with one placeholder for each film and image, by the tokenizer's own template."""
    plain = [part if part["type"] == "text" else {"type": part["type"]} for part in message["content"]]
    messages = [{"role": "user", "content": plain}]
    return template.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def beyond(arguments: dict[str, Tensor], answer: list[int]) -> dict[str, Tensor]:
    """The arguments of a prompt and its answer."""
    longer = {"input_ids": torch.tensor([answer]), "mm_token_type_ids": torch.zeros(1, len(answer), dtype=torch.long)}
    return arguments | {name: torch.cat([arguments[name], more], dim=1) for name, more in longer.items()}


@needs_torchvision
def test_prompts_are_those_of_the_models_own_processor(model: Path, template: ChatTemplate, processor: Any) -> None:
    reader = template.shown.reader
    assert reader is not None and reader.no_videos == ""
    for shown in SHOWN:
        message = in_shape(asking("what?", *shown), images=True)
        ids = template.first([message])
        own = own_arguments(processor, rendered(template, asking("what?", *shown)), shown)
        assert ids == own["input_ids"][0].tolist()
        places = reader.places(images_of(message), ids)
        kinds = [reader.video_token_id if isinstance(one, list) else reader.token_id for one in shown]
        held = [{*ids[one.start : one.end]} for one in places]
        assert all(kind in own for own, kind in zip(held, kinds, strict=True))
        assert timed(model) or all(len(own) == 1 for own in held)


@pytest.fixture
def driver(model: Path) -> Iterator[Driver]:
    loaded = load_served(str(model), "float32", "cpu", 512)
    engine = Engine(lambda: make_runner(loaded, 8), max_running=8, seed=0, threads=1).start()
    engine.ready.result(SECONDS)
    yield Driver(engine)
    assert engine.stop(timeout=SECONDS)


@needs_torchvision
def test_greedy_tokens_and_logprobs_equal_those_of_generate(
    driver: Driver, template: ChatTemplate, processor: Any
) -> None:
    plain: Any = driver.engine.runner.loaded.model
    reader, requests = template.shown.reader, []
    assert reader is not None
    for shown in SHOWN:
        message = in_shape(asking("what?", *shown), images=True)
        ids = template.first([message])
        request = driver.make(ids, SamplingParams(max_new_tokens=7, temperature=0.0, ignore_eos=True))
        request.images = tuple(reader.places(images_of(message), ids))
        requests.append(request)
    driver.run(*requests)
    for shown, request in zip(SHOWN, requests, strict=True):
        own = own_arguments(processor, rendered(template, asking("what?", *shown)), shown)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = plain.generate(
                **own, attention_mask=torch.ones_like(own["input_ids"]), do_sample=False, max_new_tokens=7,
                min_new_tokens=7, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert request.output == out[0, len(request.prompt) :].tolist()
            logits = plain(**beyond(own, request.output), use_cache=False).logits[0].double()
        rows = logits[len(request.prompt) - 1 : -1].log_softmax(-1)
        exact = rows.gather(-1, torch.tensor(request.output)[:, None]).squeeze(-1)
        assert (torch.tensor(request.logprobs).double() - exact).abs().max() < SERVED
    assert requests[0].prompt == requests[1].prompt and requests[0].logprobs != requests[1].logprobs


@needs_torchvision
async def test_ranks_with_images_and_videos_and_ranks_without_go_through_the_tower_together(
    model: Path, template: ChatTemplate, tmp_path: Path
) -> None:
    image, short = picture(9, 16, 16), film(1, 2, 16)
    shown = [[short, image], [], [image], [film(3, 2, 16)], [], [], [picture(2, 16, 16)]]
    drawn = random.Random(0)
    played = [
        await play(template, [asking("what?", *own)], [[drawn.randrange(3, 250) for _ in range(drawn.randint(3, 7))]])
        for own in shown
    ]
    columns = Columns.of([episode_of(one, index) for index, one in enumerate(played)])
    await asyncio.to_thread(updated_alike, model, columns, tmp_path)


@needs_torchvision
async def test_logprobs_and_gradients_equal_the_models_own_on_each_sequence_alone(
    model: Path, template: ChatTemplate, processor: Any
) -> None:
    answers = [[5, 6, 7, 8, 9], [9, 5], [6, 6, 30], [40, 41, 42, 43], [7, 8]]
    messages = [asking("what?", *shown) for shown in SHOWN]
    played = [await play(template, [message], [said]) for message, said in zip(messages, answers, strict=True)]
    columns = Columns.of([episode_of(one, index) for index, one in enumerate(played)])
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    plain = AutoModelForImageTextToText.from_pretrained(model, **how).eval()
    logprobs, entropies = [], []
    for shown, message, said in zip(SHOWN, messages, answers, strict=True):
        said = [*said, template.eos_id]
        own = beyond(own_arguments(processor, rendered(template, message), shown), said)
        rows = (plain(**own, use_cache=False).logits[0, -len(said) - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
        logprobs.append(rows.gather(-1, torch.tensor(said)[:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    wanted, spread = torch.cat(logprobs), torch.cat(entropies)
    weights = torch.linspace(0.5, 1.5, len(wanted))
    of_wanted = gradients(plain, (weights * (wanted - 0.1 * spread)).sum())
    trained = load_model(model, context=512).train()
    batch = batch_of(columns, layout_of(trained))
    assert "pixel_values_videos" in batch.pixels and "pixel_values" in batch.pixels
    found, entropy = Policy(trained, TEMPERATURE, CHUNK)(batch)
    assert (found.detach() - wanted.detach()[batch.places]).abs().max() < EXACT
    same(gradients(trained, (weights[batch.places] * (found - 0.1 * entropy)).sum()), of_wanted)


@needs_torchvision
async def test_a_session_sends_frames_to_the_embedded_engine(model: Path, template: ChatTemplate) -> None:
    message = in_shape(asking("what?", film(1), picture(9, 16, 16)), images=True)
    ids = template.first([message])
    assert template.shown.reader is not None
    images = tuple(template.shown.reader.places(images_of(message), ids))
    with served(model) as url:
        backend = EmbeddedBackend(url, SECONDS)
        asked = Asked(max_new_tokens=3, seed=1, images=images)
        found = [await backend.generate(ids, asked, request_id=name) for name in ("first", "again")]
        await backend.close()
    assert len(found[0].token_ids) == 3 and found[0].token_ids == found[1].token_ids


def test_a_model_whose_processor_needs_torchvision_says_so_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    alone = ChatTemplate.from_folder(model)
    with pytest.raises(ImageRefused, match=r"Qwen\dVLProcessor needs torchvision for them") as found:
        alone.first([in_shape(asking("what?", film(1)), images=True)])
    assert "\n" not in str(found.value) and "show frames as images" in str(found.value)


def test_a_model_that_reads_images_alone_says_so(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(build_tiny_vision(tmp_path, "idefics3"))
    with pytest.raises(ImageRefused, match="transformers' Idefics3Processor reads none"):
        template.first([in_shape(asking("what?", film(1)), images=True)])
    assert isinstance(template.shown.reader, ImageReader)


def test_servers_that_take_no_frames_refuse_them(model: Path) -> None:
    settings = [f"model.name={model}", "inference.engine=sglang", "inference.python=python", "launch.device=cpu"]
    template, _, _ = make_settings(resolve(load_recipe("shapes_grpo", settings), None), model)
    with pytest.raises(ImageRefused, match=r"inference\.engine=sglang take no frames beside ids"):
        template.first([in_shape(asking("what?", film(1)), images=True)])
