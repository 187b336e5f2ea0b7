"""Images beside ids on a real SGLang and a real vLLM: logprobs are those of transformers with the same pixels."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.config.recipe import Recipe
from agentrl.core.images import images_of
from agentrl.core.message_shape import in_shape
from agentrl.inference.backend import SamplingParams
from agentrl.inference.template import ChatTemplate
from agentrl.launch.servers import start_servers
from agentrl.launch.supervisor import Supervisor
from agentrl.rollout.assemble import make_backend
from tests.servers.conftest import REAL
from tests.tiny_vision import build_tiny_vision, picture

SIDE = 56  # pixels: the least that SGLang leaves as they are
CLOSE, APART = 1e-3, 1.0  # nats: its kernels round otherwise; without the image answers are unlikely


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_tiny_vision(tmp_path_factory.mktemp("qwen2_vl"), hidden=256)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["in_chans"] = 3  # as the models' own files say it; SGLang reads this name
    (folder / "config.json").write_text(json.dumps(config))
    sizes = json.loads((folder / "preprocessor_config.json").read_text())
    sizes["size"] = {"shortest_edge": 64, "longest_edge": 65_536}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture(scope="module", params=REAL)
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Recipe, str]]:
    folder = tmp_path_factory.mktemp(request.param)
    inference = {"engine": request.param, "dtype": "float32", "context_length": 512, "max_running": 4, "threads": 1}
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(model)}, "env": {"id": "arithmetic"}, "sampling": {"max_new_tokens": 16},
            "train_dataset": {"name": "arithmetic"}, "valid_dataset": {"name": "arithmetic"},
            "inference": {**inference, "start_timeout": 300.0}, "launch": {"device": "cpu"},
        }
    )  # fmt: skip
    supervisor = Supervisor(folder / "logs")
    try:
        (url,) = start_servers(recipe, model, folder, supervisor)
        yield recipe, url
    finally:
        supervisor.stop()


@pytest.mark.parametrize("shapes", [[(SIDE, SIDE)], [(SIDE, SIDE)] * 2, [(70, 90)]], ids=["one", "two", "resized"])
async def test_logprobs_after_images_are_those_of_the_model(
    model: Path, served: tuple[Recipe, str], shapes: list[tuple[int, int]]
) -> None:
    shown = [picture(seed, *shape) for seed, shape in enumerate(shapes)]
    template = ChatTemplate.from_folder(model)
    reader = template.shown.reader
    assert reader is not None
    parts: list[dict[str, Any]] = [{"type": "image", "image": one} for one in shown]
    message = in_shape({"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}, images=True)
    ids = template.first([message])
    images = tuple(reader.places(images_of(message), ids))
    backend = make_backend(*served)
    for seed in range(20):
        params = SamplingParams(max_new_tokens=5, seed=seed, images=images)
        found = await backend.generate(ids, params, request_id=f"try-{seed}")
        if reader.token_id not in found.token_ids:  # a sampled placeholder would be an image to transformers
            break
    await backend.close()

    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    pixels = Qwen2VLImageProcessorPil.from_pretrained(model)(images=shown, return_tensors="pt")
    whole = torch.tensor([ids + found.token_ids])
    kinds = (whole == reader.token_id).long()

    def logprobs(values: torch.Tensor) -> torch.Tensor:
        out = plain(
            input_ids=whole, mm_token_type_ids=kinds, pixel_values=values, image_grid_thw=pixels["image_grid_thw"]
        )
        rows = out.logits[0, len(ids) - 1 : -1].log_softmax(-1)
        return rows.gather(-1, torch.tensor(found.token_ids)[:, None])[:, 0]

    with torch.no_grad():
        own, blank = logprobs(pixels["pixel_values"]), logprobs(torch.zeros_like(pixels["pixel_values"]))
    torch.testing.assert_close(torch.tensor(found.logprobs), own, atol=CLOSE, rtol=0)
    assert (blank - own).abs().max() > APART, "the answer depends on the image"
