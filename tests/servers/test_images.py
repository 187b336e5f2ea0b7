"""Images beside ids on a real SGLang and a real vLLM: logprobs are those of transformers with the same pixels."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.config.recipe import Recipe
from agentrl.core.images import images_of
from agentrl.core.message_shape import in_shape
from agentrl.inference.backend import Backend, Generation, PauseMode, SamplingParams
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
        pictures = [picture(seed, *shape) for seed, shape in enumerate(shapes)]
        self.template = ChatTemplate.from_folder(model)
        reader = self.template.shown.reader
        assert reader is not None
        self.placeholder = reader.token_id
        parts: list[dict[str, Any]] = [{"type": "image", "image": one} for one in pictures]
        message = in_shape({"role": "user", "content": [*parts, {"type": "text", "text": text}]}, images=True)
        self.ids = self.template.first([message])
        self.images = tuple(reader.places(images_of(message), self.ids))
        self.pixels = Qwen2VLImageProcessorPil.from_pretrained(model)(images=pictures, return_tensors="pt")

    async def answer(self, backend: Backend, tokens: int = 5) -> Generation:
        """An answer without a sampled placeholder, which transformers would take for an image."""
        for seed in range(50):
            params = SamplingParams(max_new_tokens=tokens, seed=seed, images=self.images)
            found = await backend.generate(self.ids, params, request_id=f"try-{tokens}-{seed}")
            if self.placeholder not in found.token_ids:
                return found
        raise AssertionError("every answer held a placeholder")

    @torch.no_grad()
    def gap(self, model: Path, found: Generation, *, blank: bool = False) -> float:
        """The largest distance of an answer's logprobs from those of a model, with the pictures or without."""
        plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        whole = torch.tensor([self.ids + found.token_ids])
        values, grid = self.pixels["pixel_values"], self.pixels["image_grid_thw"]
        values = torch.zeros_like(values) if blank else values
        kinds = (whole == self.placeholder).long()
        logits = plain(input_ids=whole, mm_token_type_ids=kinds, pixel_values=values, image_grid_thw=grid).logits
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
