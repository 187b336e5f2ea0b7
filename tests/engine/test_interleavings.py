"""Any order of requests, aborts, pauses and weight changes gives each request the tokens it would get alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from agentrl.engine import runner as runner_module
from agentrl.engine.engine import Engine
from agentrl.engine.kept_prefixes import LEAST
from agentrl.engine.model import load_model
from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Request
from agentrl.engine.runner import ModelRunner
from tests.engine.driving import Driver

LONGEST = 40  # tokens of a prompt: several chunks of the size used here
actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, LONGEST), st.integers(0, 12)),
    st.tuples(st.just("turns"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("pause"), st.sampled_from(["abort", "retract", "in_place"])),
    st.tuples(st.just("resume")),
    st.tuples(st.just("load"), st.integers(0, 1)),
)


@pytest.fixture(scope="module")
def folders(tiny: Path, other: Path) -> list[Path]:
    return [tiny, other]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[torch.nn.Module]:
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]


@pytest.mark.parametrize("path", ["leaner forward", "own forward"])
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.lists(actions, min_size=4, max_size=24),
    kept=st.sampled_from([0, 48, 4096]),
    most=st.sampled_from([None, 60, 100]),
)
def test_interleavings(
    steps: list[tuple[Any, ...]], kept: int, most: int | None, path: str,
    folders: list[Path], models: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        if path == "own forward":
            patch.setattr(runner_module, "fast_path", lambda model, compiled: None)
        _run(steps, kept, most, folders, models)


def _run(
    steps: list[tuple[Any, ...]], kept: int, most: int | None, folders: list[Path], models: list[torch.nn.Module]
) -> None:
    loaded = load_model(str(folders[0]), "float32", "cpu")
    engine = Engine(lambda: ModelRunner(loaded, 4, kept), max_running=4, max_tokens=most, prefill_chunk=LEAST)
    engine.build()
    driver = Driver(engine)
    weights = [0]  # of each version
    requests: list[Request] = []
    cuts: dict[str, set[int]] = {}  # where a request's cache was computed anew, in tokens of its output
    paused = False

    def cut() -> None:
        for request in engine.scheduler.running:
            cuts.setdefault(request.rid, set()).add(len(request.output))

    for name, *args in steps:
        match name:
            case "submit":
                which, length, new = args
                prompt = [(which * 7 + position) % 250 for position in range(length)]
                requests.append(driver.make(prompt, SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)))
                engine.submit(requests[-1:])
            case "turns":
                for _ in range(args[0]):
                    engine.turn()
            case "abort" if requests:
                engine.abort(requests[args[0] % len(requests)].rid)
            case "pause":
                paused = True
                if args[0] == "retract":
                    cut()
                engine.pause(args[0])
            case "resume":
                paused = False
                engine.resume()
            case "load":
                if not paused:
                    cut()
                weights.append(args[0])
                engine.load(str(folders[args[0]]), str(len(weights) - 1))
        engine.turn()
    engine.resume()
    for _ in range(500):
        engine.turn()
        if not engine.scheduler.unfinished:
            break
    for request in requests:
        assert request.finish is not None, "a request was forgotten"
        if request.finish.kind != "abort":
            assert len(request.output) == request.limit
        _check(request, [models[number] for number in weights], cuts.get(request.rid, set()))


def _check(request: Request, models: list[Any], cuts: set[int]) -> None:
    """Each token is the best one under its weights, over a cache that survives until it is cut."""
    versions = [int(span.version) for span in request.spans for _ in range(span.end - span.start)]
    ids, cache = list(request.prompt), DynamicCache()
    for place, (token, version) in enumerate(zip(request.output, versions, strict=True)):
        if place in cuts:
            cache = DynamicCache()
        with torch.inference_mode():
            known = cache.get_seq_length()
            logits = models[version](torch.tensor([ids[known:]]), cache=cache, use_cache=True).logits[0, -1]
        assert logits[token] >= logits.max() - 1e-4
        assert logits.log_softmax(-1)[token].item() == pytest.approx(request.logprobs[place], abs=2e-4)
        ids.append(token)


def test_a_long_prompt_does_not_hold_up_what_runs(tiny: Path) -> None:
    engine = Engine(lambda: ModelRunner(load_model(str(tiny), "float32", "cpu"), 4), max_running=4, prefill_chunk=16)
    engine.build()
    driver = Driver(engine)
    running = driver.make([1, 2, 3], SamplingParams(max_new_tokens=60, ignore_eos=True))
    engine.submit([running])
    engine.turn()
    rng = random.Random(0)
    long = driver.make([rng.randrange(250) for _ in range(160)])
    engine.submit([long])
    seen = []
    while not long.output:
        computed = engine.runner.prefilled_tokens
        engine.turn()
        seen.append((engine.runner.prefilled_tokens - computed, len(running.output)))
    assert [new for new, _ in seen] == [16] * 10
    assert [tokens for _, tokens in seen] == list(range(3, 13)), "a token between any two parts"


def test_a_request_waits_until_its_tokens_fit(tiny: Path) -> None:
    engine = Engine(lambda: ModelRunner(load_model(str(tiny), "float32", "cpu"), 4), max_running=4, max_tokens=50)
    engine.build()
    driver = Driver(engine)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    first, second, third = (driver.make([number] * 10, params) for number in range(3))
    engine.submit([first, second, third])
    engine.turn()
    assert len(engine.scheduler.running) == 2 and list(engine.scheduler.waiting) == [third]
    while not third.finish:
        engine.turn()
        assert sum(request.footprint for request in engine.scheduler.running) <= 50
    assert first.finish and second.finish
