"""Every decoder family is served: greedy tokens and logprobs equal those of transformers' own `generate`.

Prompts are longer than the windows of the miniatures; a group of samples, another prompt, and answers of different
lengths run at the same time, so that rows are dropped and moved while others go on.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engine.engine import Engine
from agentrl.engine.make_runner import make_runner
from agentrl.engine.model import LoadedModel, ModelError, load_without_tokenizer
from agentrl.engine.params import SamplingParams
from tests.engine.driving import SECONDS, Driver, reference_logprobs
from tests.models.families import FAMILIES, SAMPLE_WITH_IMAGES, UNSERVED, small_model
from tests.models.ways import WAYS, WAYS_WITH_IMAGES

EXACT = 1e-4  # largest difference of a logprob in nats, in float32
SAMPLE = (  # characteristic families, which are tried each time
    "llama", "gpt2", "mixtral", "mistral", "gemma2", "gpt_oss", "llama4_text", "mamba2", "qwen3_next", "jamba", "rwkv",
)  # fmt: skip
PROMPTS = ([7, 9, 11, 5, 3, 8, 21, 30, 4], [7, 9, 11, 5, 3, 8, 40], [6, 5])


def load(name: str, folder: Path, dtype: str = "float32") -> LoadedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small_model(name).save_pretrained(folder)
        return load_without_tokenizer(str(folder), dtype, "cpu", 64)


def generated(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of `generate`, which no end token ends; with a cache unless that does not agree with the model."""
    model: Any = loaded.model
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.tensor([prompt])
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
        how["use_cache"] = loaded.past != "recomputed"
        out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **how)
    return out[0, len(prompt) :].tolist()


def check_family(name: str, folder: Path) -> str:
    """Checks a family's tokens and logprobs; returns how its past is kept."""
    loaded = load(name, folder)
    engine = Engine(lambda: make_runner(loaded, 8), max_running=8, seed=0, threads=1).start()
    try:
        engine.ready.result(SECONDS)
        driver = Driver(engine)
        greedy = SamplingParams(max_new_tokens=7, temperature=0.0, ignore_eos=True)
        short, long = (SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (3, 9))
        asked = [driver.make(prompt, greedy) for prompt in PROMPTS]
        group = [driver.make(PROMPTS[0], params) for params in (short, long, short, long)]
        scored = driver.make(PROMPTS[1], greedy, logprob_start=0)
        driver.run(*asked, *group, scored)
        assert not any(request.finish.message for request in (*asked, *group, scored) if request.finish)
        for request in (*asked, scored):
            assert request.output == generated(loaded, list(request.prompt), 7)
        for request in (*asked, *group):
            exact = reference_logprobs(loaded.model, request)
            assert (torch.tensor(request.logprobs).double() - exact).abs().max() < EXACT
        with torch.inference_mode():
            rows = loaded.model(torch.tensor([PROMPTS[1]]), use_cache=False).logits[0].double().log_softmax(-1)
        own = rows[:-1].gather(-1, torch.tensor(PROMPTS[1])[1:, None]).squeeze(-1)
        assert scored.input_logprobs == pytest.approx(own.tolist(), abs=EXACT)
        return engine.runner.past
    finally:
        assert engine.stop(timeout=SECONDS)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_characteristic_family_is_served_exactly(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS[name][1]


@pytest.mark.parametrize("name", SAMPLE_WITH_IMAGES)
def test_a_model_that_takes_images_is_served_as_text(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS_WITH_IMAGES[name][1]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(SAMPLE) - set(UNSERVED)))
def test_every_family_is_served_exactly(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS[name][1]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(WAYS_WITH_IMAGES) - set(SAMPLE_WITH_IMAGES)))
def test_every_model_that_takes_images_is_served_as_text(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS_WITH_IMAGES[name][1]


@pytest.mark.parametrize("name", UNSERVED)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=UNSERVED[name]):
        load(name, tmp_path)
