"""The embedded engine with images: greedy tokens and logprobs are those of transformers' own `generate`.

A group of samples, prompts with other images and prompts without any run at the same time, with answers of different
lengths; the tiny models sample placeholders too, which are tokens like any other.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from agentrl.core.image_reader import PromptImage
from agentrl.core.images import data_url, image_bytes
from agentrl.engine.engine import Engine
from agentrl.engine.make_runner import make_runner
from agentrl.engine.model import LoadedModel, load_model
from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Request
from agentrl.inference.template import ChatTemplate
from agentrl.models.pixels import KINDS, Pixels
from tests.engine.driving import SECONDS, Driver
from tests.served import served
from tests.tiny_vision import picture

EXACT = 1e-4  # largest difference of a logprob in nats, in float32


@pytest.fixture(scope="module")
def loaded(tiny_vision: Path) -> LoadedModel:
    return load_model(str(tiny_vision), "float32", "cpu", 256)


@pytest.fixture(scope="module")
def driver(loaded: LoadedModel) -> Iterator[Driver]:
    engine = Engine(lambda: make_runner(loaded, 8), max_running=8, seed=0, threads=1).start()
    engine.ready.result(SECONDS)
    yield Driver(engine)
    assert engine.stop(timeout=SECONDS)


@pytest.fixture(scope="module")
def template(tiny_vision: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_vision)


def prompt_of(template: ChatTemplate, text: str, *images: Any) -> tuple[list[int], tuple[PromptImage, ...]]:
    urls = [data_url(one) for one in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    ids = template.first([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])
    assert template.shown.reader is not None
    return ids, tuple(template.shown.reader.places(urls, ids))


def asked(
    driver: Driver, prompt: tuple[list[int], tuple[PromptImage, ...]], params: SamplingParams, **how: Any
) -> Request:
    request = driver.make(prompt[0], params, **how)
    request.images = prompt[1]
    return request


def arguments(pixels: Pixels, request: Request, ids: list[int]) -> dict[str, Any]:
    """Arguments of the model for a sequence, made by hand from its processor."""
    if not request.images:
        return {}
    tokens = torch.tensor([ids])
    found: dict[str, Any] = pixels.tensors([image_bytes(one.url) for one in request.images], torch.device("cpu"))
    if KINDS in pixels._known:
        kinds = torch.zeros_like(tokens)
        for image in request.images:
            kinds[0, image.start : image.end] = tokens[0, image.start : image.end] == pixels.reader.token_id
        found[KINDS] = kinds.int()
    return found


def generated(loaded: LoadedModel, request: Request, count: int) -> list[int]:
    """Greedy tokens of `generate`, which no end token ends."""
    ids = torch.tensor([list(request.prompt)])
    assert loaded.pixels is not None
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "use_cache": True}
        out = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0,
            **arguments(loaded.pixels, request, list(request.prompt)), **how,
        )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def reference(loaded: LoadedModel, request: Request) -> torch.Tensor:
    """Logprobs of a request's output under the plain model over the whole sequence, without a cache."""
    ids = [*request.prompt, *request.output]
    assert loaded.pixels is not None and loaded.pixels.reader.token_id not in request.output
    with torch.inference_mode():
        how = arguments(loaded.pixels, request, ids)
        logits = loaded.model(input_ids=torch.tensor([ids]), use_cache=False, **how).logits[0].double()
    rows = logits[len(request.prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(request.output)[:, None]).squeeze(-1)


def test_greedy_tokens_and_logprobs_equal_those_of_generate(
    driver: Driver, loaded: LoadedModel, template: ChatTemplate
) -> None:
    assert driver.engine.runner.past == "caches"
    one, other = prompt_of(template, "what?", picture(1)), prompt_of(template, "what?", picture(2))
    two = prompt_of(template, "and now?", picture(3, 24, 16), picture(1))
    none = (template.first([{"role": "user", "content": "what?"}]), ())
    assert one[0] == other[0], "the same ids, with another image"
    greedy = SamplingParams(max_new_tokens=7, temperature=0.0, ignore_eos=True)
    short, long = (SamplingParams(max_new_tokens=n, ignore_eos=True, sampling_seed=n) for n in (3, 9))
    requests = [asked(driver, prompt, greedy) for prompt in (one, other, two, none)]
    group = [asked(driver, one, params) for params in (short, long, short)]
    driver.run(*requests, *group)
    assert not any(request.finish.message for request in (*requests, *group) if request.finish)
    for request in requests:
        assert request.output == generated(loaded, request, 7)
    assert requests[0].logprobs != requests[1].logprobs, "another image gives other logits"
    for request in (*requests, *group):
        if loaded.pixels is not None and loaded.pixels.reader.token_id in request.output:
            continue  # the plain model would take it for the place of an image
        assert (torch.tensor(request.logprobs).double() - reference(loaded, request)).abs().max() < EXACT


def test_a_prompt_is_scored_with_its_image(driver: Driver, loaded: LoadedModel, template: ChatTemplate) -> None:
    prompt = prompt_of(template, "what?", picture(1))
    (request,) = driver.run(asked(driver, prompt, SamplingParams(max_new_tokens=0), logprob_start=0))
    assert loaded.pixels is not None
    with torch.inference_mode():
        how = arguments(loaded.pixels, request, prompt[0])
        logits = loaded.model(input_ids=torch.tensor([prompt[0]]), use_cache=False, **how).logits[0]
    rows = logits.double().log_softmax(-1)
    own = rows[:-1].gather(-1, torch.tensor(prompt[0])[1:, None]).squeeze(-1)
    assert request.input_logprobs == pytest.approx(own.tolist(), abs=EXACT)


def test_a_sampled_placeholder_is_a_token_like_any_other(
    driver: Driver, loaded: LoadedModel, template: ChatTemplate
) -> None:
    """After a push in mode `retract` prompt and answer are computed again, the answer's placeholders among them."""
    assert loaded.pixels is not None
    token = loaded.pixels.reader.token_id
    ids, images = prompt_of(template, "what?", picture(1))
    with_it = ([*ids, token, 5, token], images)
    again = asked(driver, with_it, SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))
    stepped = asked(driver, (ids, images), SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True))
    driver.run(again)
    assert again.finish is not None and not again.finish.message
    logits, cache = driver.engine.runner._calls.with_cache(  # type: ignore[union-attr]
        torch.tensor([ids]),
        None,
        1,
        driver.engine.runner._arguments(torch.tensor([ids]), images),  # type: ignore[union-attr]
    )
    for one in (token, 5, token):
        logits, cache = driver.engine.runner._calls.with_cache(torch.tensor([[one]]), cache, 1)  # type: ignore[union-attr]
    expected = logits[0, -1].double().log_softmax(-1)
    assert again.output == [int(expected.argmax())]
    assert again.logprobs[0] == pytest.approx(expected.max().item(), abs=EXACT)
    assert stepped.output == []


def test_calls_with_images_are_checked(tiny_vision: Path, template: ChatTemplate, tiny_model: Path) -> None:
    ids, images = prompt_of(template, "what?", picture(1))
    body: dict[str, Any] = {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 3, "temperature": 0.0}, "return_logprob": True,
    }  # fmt: skip
    url, places = images[0].url, [[images[0].start, images[0].end]]
    with served(tiny_vision) as server, httpx.Client(base_url=server, timeout=SECONDS) as client:

        def ask(**more: Any) -> Any:
            answer = client.post("/generate", json=body | more)
            return answer.json() if answer.status_code == 200 else answer.json()["error"]["message"]

        named = ask(image_data=[url], image_places=places)
        assert named["meta_info"]["prompt_tokens"] == len(ids)
        for same in (ask(image_data=url), ask(image_data=[url.partition(",")[2]])):
            assert same["output_ids"] == named["output_ids"]
        many = ask(input_ids=[ids, ids], image_data=[[url], [url]], image_places=[places, places])
        assert [one["output_ids"] for one in many] == [named["output_ids"]] * 2
        assert "image placeholders were encoded" in ask(image_data=[url, url])
        assert "one pair for each of 1 images" in ask(image_data=[url], image_places=[])
        assert "placeholders from 0 to 1" in ask(image_data=[url], image_places=[[0, 1]])
        assert "holds no PNG" in ask(image_data=["aGVsbG8gaGVsbG8="])
        assert "data URL or base64" in ask(image_data=[7])
    with served(tiny_model) as server:
        answer = httpx.post(f"{server}/generate", json={"input_ids": [5], "image_data": [url]}, timeout=SECONDS)
    assert answer.status_code == 400 and "reads text alone" in answer.text


def test_images_tell_requests_apart(driver: Driver, template: ChatTemplate) -> None:
    """Requests with the same ids share one prefill only if their images are the same."""
    one, other = prompt_of(template, "so?", picture(5)), prompt_of(template, "so?", picture(6))
    params = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    before = driver.engine.runner.prefills
    driver.run(*(asked(driver, prompt, replace(params)) for prompt in (one, one, other)))
    assert driver.engine.runner.prefills - before >= 2
