"""More families with images: prompts and logits are those of transformers' own processor and forward pass."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.images import data_url, image_bytes, opened
from agentrl.engine.cache_support import wrong_image_cache
from agentrl.inference.template import ChatTemplate
from agentrl.models.decoder import decoder_of
from agentrl.models.pixels import embedded_as, pixels_of, vision_parameters
from agentrl.train.policy import load_model
from agentrl.train.probe_report import wrong_image_rows
from tests.tiny_vision import picture
from tests.vision_families import FAMILIES, build_family

EXACT = 1e-5  # relative to the largest logit, in float32


@pytest.fixture(params=FAMILIES)
def family(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[str, Path]]:
    if request.param == "smolvlm":  # it writes the times of videos in words with a package that is not needed here
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    yield request.param, build_family(tmp_path, request.param)


def prompt_of(template: ChatTemplate, text: str, *pictures: Any) -> tuple[list[int], list[str]]:
    urls = [data_url(one) for one in pictures]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return template.first([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]), urls


@torch.no_grad()
def test_rows_with_images_have_the_logits_of_each_alone(family: tuple[str, Path]) -> None:
    name, folder = family
    template, model = ChatTemplate.from_folder(folder), load_model(folder, context=400).eval()
    pixels = pixels_of(model)
    assert pixels is not None
    assert wrong_image_rows(model) is None and wrong_image_cache(model) is None
    asked = [("what?", (picture(1, 24, 16), picture(2, 32, 40))), ("hm, is it so?", (picture(3, 40, 16),)), ("no", ())]
    prompts = [prompt_of(template, text, *shown) for text, shown in asked]
    tokens = torch.zeros(len(prompts), max(len(ids) for ids, _ in prompts), dtype=torch.long)
    pictured = torch.zeros_like(tokens, dtype=torch.bool)
    for index, (ids, urls) in enumerate(prompts):
        tokens[index, : len(ids)] = torch.tensor(ids)
        pictured[index, : len(ids)] = bool(urls)
        assert len(pixels.reader.places(urls, ids)) == len(urls)
    files = [image_bytes(url) for _, urls in prompts for url in urls]
    with embedded_as(model, tokens, pixels.arguments(tokens, pictured, files)) as inputs:
        found = model(use_cache=False, **inputs).logits
    known = inspect.signature(model.forward).parameters
    for index, ((ids, urls), (text, _)) in enumerate(zip(prompts, asked, strict=True)):
        raw = f"<|im_start|>user\n{FAMILIES[name].shown * len(urls)}{text}<|im_end|>\n<|im_start|>assistant\n"
        shown = {"images": [opened(image_bytes(url)) for url in urls]} if urls else {}
        whole = pixels.reader._processor(text=[raw], return_tensors="pt", add_special_tokens=False, **shown)
        assert whole["input_ids"][0].tolist() == ids
        own = model(use_cache=False, **{name: one for name, one in whole.items() if name in known}).logits[0]
        assert (found[index, : len(ids)] - own).abs().max() < EXACT * own.abs().max()


def test_a_pass_without_images_uses_what_one_with_images_does(family: tuple[str, Path]) -> None:
    """Ranks reduce the gradients that they have: one that lacked some would leave the others waiting."""
    template, model = ChatTemplate.from_folder(family[1]), load_model(family[1], context=400).train()
    pixels, tower = pixels_of(model), vision_parameters(model)
    assert pixels is not None and tower
    ids, urls = prompt_of(template, "what?", picture(1, 24, 16))
    tokens = torch.tensor([ids])
    arguments = pixels.arguments(tokens, torch.ones_like(tokens, dtype=torch.bool), [image_bytes(url) for url in urls])
    model(input_ids=tokens, use_cache=False, **arguments).logits.sum().backward()
    used = [one.grad is not None for one in tower]
    model.zero_grad()
    pixels.idle(decoder_of(model), tokens.device).backward()
    assert used == [one.grad is not None for one in tower]
