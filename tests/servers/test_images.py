"""Images beside ids on a real SGLang and a real vLLM: logprobs are those of transformers with the same pixels."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.config.recipe import Recipe
from agentrl.core.image_reader import PromptImage
from agentrl.core.images import images_of
from agentrl.core.message_shape import in_shape
from agentrl.inference.backend import Backend, Generation, InferenceError, PauseMode, SamplingParams
from agentrl.inference.template import ChatTemplate
from agentrl.launch.servers import start_servers
from agentrl.launch.supervisor import Supervisor
from agentrl.rollout.assemble import make_backend, pause_mode
from tests.end_to_end import metrics, overrides, run
from tests.servers.conftest import REAL
from tests.tiny_vision import build_tiny_vision, picture

SIDE = 56  # pixels: the least that SGLang leaves as they are
CLOSE, APART = 1e-3, 1.0  # nats: its kernels round otherwise; without the image answers are unlikely
SECONDS = 120.0


def build(folder: Path, kind: str, seed: int) -> Path:
    build_tiny_vision(folder, kind, hidden=256, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["in_chans"] = 3  # as the models' own files say it; SGLang reads this name
    (folder / "config.json").write_text(json.dumps(config))
    sizes = json.loads((folder / "preprocessor_config.json").read_text())
    sizes["size"] = {"shortest_edge": 64, "longest_edge": 65_536}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights only, those of the image tower too."""
    first, second = (build(tmp_path_factory.mktemp(f"{request.param}_{seed}"), request.param, seed) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="module", params=REAL)
def served(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Recipe, str]]:
    folder, model = tmp_path_factory.mktemp(request.param), models[0]
    inference = {"engine": request.param, "dtype": "float32", "context_length": 512, "max_running": 16, "threads": 1}
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(model)}, "env": {"id": "arithmetic"}, "sampling": {"max_new_tokens": 16},
            "train_dataset": {"name": "arithmetic"}, "valid_dataset": {"name": "arithmetic"},
            "inference": {**inference, "start_timeout": 300.0}, "launch": {"device": "cpu"},
            "trainer": {"freeze": []},
        }
    )  # fmt: skip
    supervisor = Supervisor(folder / "logs")
    try:
        (url,) = start_servers(recipe, model, folder, supervisor)
        yield recipe, url
    finally:
        supervisor.stop()


@pytest.fixture
async def backend(served: tuple[Recipe, str], models: tuple[Path, Path]) -> AsyncIterator[Backend]:
    """A client of the server, which holds the first model's weights as version 0."""
    made = make_backend(*served)
    await made.pause("abort")
    await made.load(str(models[0]), 0)
    await made.resume()
    yield made
    await made.close()


class Shown:
    """A question about pictures, as a prompt and as the model's own processor reads it."""

    def __init__(self, model: Path, shapes: list[tuple[int, int]], text: str = "what?") -> None:
        self.template = ChatTemplate.from_folder(model)
        reader = self.template.shown.reader
        assert reader is not None
        self.reader, self.placeholder = reader, reader.token_id
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(model)
        self.ids, self.images, self.pictures = list[int](), tuple[PromptImage, ...](), list[Any]()
        message = self._message([picture(seed, *shape) for seed, shape in enumerate(shapes)], text)
        self._show(message, self.template.first([message]))

    def _message(self, pictures: list[Any], text: str) -> dict[str, Any]:
        self.pictures += pictures
        parts: list[dict[str, Any]] = [{"type": "image", "image": one} for one in pictures]
        return in_shape({"role": "user", "content": [*parts, {"type": "text", "text": text}]}, images=True)

    def _show(self, message: dict[str, Any], ids: list[int]) -> None:
        start, own = len(self.ids), self.reader.places(images_of(message), ids)
        self.images += tuple(PromptImage(one.url, one.start + start, one.end + start) for one in own)
        self.ids += ids

    def goes_on(self, said: list[int], pictures: list[Any]) -> None:
        """Adds an answer, and a message with more pictures."""
        self.ids += said
        message, answered = self._message(pictures, "and now?"), {"role": "assistant", "content": ""}
        self._show(message, self.template.following([message], answered=answered, answer_ids=said, tools=[]))

    async def answer(self, backend: Backend, tokens: int = 5, **how: Any) -> Generation:
        """An answer without a sampled placeholder, with which SGLang refuses to go on."""
        for seed in range(50):
            params = SamplingParams(max_new_tokens=tokens, seed=seed, images=self.images, **how)
            found = await backend.generate(self.ids, params, request_id=f"try-{uuid4()}")
            if not any(map(self.reader.are_placeholders, found.token_ids)):
                return found
        raise AssertionError("every answer held a placeholder")

    @torch.no_grad()
    def gap(self, model: Path, found: Generation, *, blank: bool = False) -> float:
        """The largest distance of an answer's logprobs from those of a model, with the pictures or without.

        A placeholder outside of the pictures' places is a token like any other.
        """
        plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        whole = torch.tensor([self.ids + found.token_ids])
        pixels = self.processor(images=self.pictures, return_tensors="pt")
        values, grid = pixels["pixel_values"], pixels["image_grid_thw"]
        kinds = torch.zeros_like(whole)
        for image in self.images:
            kinds[0, image.start : image.end] = 1
        embeddings = plain.get_input_embeddings()
        hook = embeddings.register_forward_pre_hook(lambda *_: (whole,))
        logits = plain(
            input_ids=torch.where((whole == self.placeholder) & (kinds == 0), 0, whole), mm_token_type_ids=kinds,
            pixel_values=torch.zeros_like(values) if blank else values, image_grid_thw=grid,
        ).logits  # fmt: skip
        hook.remove()
        rows = logits[0, len(self.ids) - 1 : -1].log_softmax(-1)
        own = rows.gather(-1, torch.tensor(found.token_ids)[:, None])[:, 0]
        return (torch.tensor(found.logprobs) - own).abs().max().item()


@pytest.mark.parametrize("shapes", [[(SIDE, SIDE)], [(SIDE, SIDE)] * 2, [(70, 90)]], ids=["one", "two", "resized"])
async def test_logprobs_after_images_are_those_of_the_model(
    models: tuple[Path, Path], backend: Backend, shapes: list[tuple[int, int]]
) -> None:
    shown = Shown(models[0], shapes)
    found = await shown.answer(backend)
    assert shown.gap(models[0], found) < CLOSE
    assert shown.gap(models[0], found, blank=True) > APART, "the answer depends on the image"


async def test_images_of_a_later_turn_are_seen_also_behind_a_prefix_that_is_cached(
    models: tuple[Path, Path], backend: Backend
) -> None:
    shown = Shown(models[0], [(SIDE, SIDE)], text="what? " * 30)
    said = await shown.answer(backend, 20)
    again = shown.pictures[0]  # the same image once more in one conversation
    shown.goes_on(said.token_ids, [picture(7, 70, 90), again])
    answers = [await shown.answer(backend) for _ in range(2)]
    assert all(shown.gap(models[0], found) < CLOSE for found in answers)
    assert shown.gap(models[0], answers[1], blank=True) > APART


async def test_a_sampled_placeholder_is_a_token_like_any_other_or_is_refused(
    served: tuple[Recipe, str], models: tuple[Path, Path], backend: Backend
) -> None:
    shown = Shown(models[0], [(SIDE, SIDE)])
    shown.goes_on([70, shown.placeholder, 71, shown.placeholder, shown.placeholder, 72], [picture(7, SIDE, SIDE)])
    if served[0].inference.engine == "sglang":
        with pytest.raises(InferenceError, match="one was sampled"):
            await shown.answer(backend)
        return
    found = await shown.answer(backend)
    assert shown.gap(models[0], found) < CLOSE


async def test_a_schema_and_stop_texts_hold_beside_images(models: tuple[Path, Path], backend: Backend) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    shown = Shown(models[0], [(SIDE, SIDE)])
    told = await shown.answer(backend, 100, json_schema=json.dumps(schema))
    assert json.loads(shown.template.text(told.token_ids)) in ({"a": "x"}, {"a": "y"})
    free = await shown.answer(backend, 40)
    stop = next(one for one in shown.template.text(free.token_ids) if one.isascii() and one.isalnum())
    params = SamplingParams(max_new_tokens=40, seed=0, images=shown.images, stop=(stop,))
    ended = [await backend.generate(shown.ids, replace(params, seed=seed), request_id=f"s{seed}") for seed in range(30)]
    stopped = [one for one in ended if stop in shown.template.text(one.token_ids)]
    assert stopped and all(one.finish_reason == "stop" for one in stopped)


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_an_image_that_was_shown_before_is_seen_by_the_new_weights(
    served: tuple[Recipe, str], models: tuple[Path, Path], backend: Backend, mode: PauseMode
) -> None:
    shown = Shown(models[0], [(SIDE, SIDE)], text="what? " * 30)  # long enough to be found in vLLM's prefix cache
    before = await shown.answer(backend)
    running = [
        asyncio.create_task(
            backend.generate(
                shown.ids,
                SamplingParams(max_new_tokens=200, seed=index, images=shown.images),
                request_id=f"{mode}-{index}",
            )
        )
        for index in range(12)
    ]
    await asyncio.sleep(0.7)  # a server tells nobody that it is in the middle
    recipe = served[0].model_copy(update={"weights": served[0].weights.model_copy(update={"pause_mode": mode})})
    await backend.pause(pause_mode(recipe, shown.template))
    await backend.load(str(models[1]), 1)
    await backend.resume()
    after = await shown.answer(backend)
    assert shown.gap(models[0], before) < CLOSE and shown.gap(models[1], after) < CLOSE
    assert shown.gap(models[0], after) > APART, "both models say the same"
    ended = await asyncio.wait_for(asyncio.gather(*running), SECONDS)
    assert all(one.token_ids or one.finish_reason == "abort" for one in ended)


@pytest.mark.parametrize("kind", REAL)
async def test_updates_of_the_tower_reach_a_server(models: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    seen = overrides(models[0], tmp_path, "seen", f"inference.engine={kind}", "inference.start_timeout=300")
    settings = [f"{one[:-8]}:Pictures" if one.endswith(":Letters") else one for one in seen]
    result = await asyncio.to_thread(run, "recipe", "run", "arithmetic_grpo", *settings, "trainer.freeze=[]")
    assert result.returncode == 0, result.stdout
    records = metrics(tmp_path / "seen")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["train/grad_norm"] > 0 for record in records[1:])
    assert all(record["mismatch/ratio_max"] < 5e-3 for record in records[1:]), "each answer is of the weights it names"
    exported = load_file(tmp_path / "seen" / "model" / "model.safetensors")
    original = load_file(models[0] / "model.safetensors")
    assert all(not torch.equal(exported[name], tensor) for name, tensor in original.items() if "visual" in name)
