"""The engine names the experts of each token as SGLang does: those that the model's own forward pass chooses.

Mixtral's miniature has a window, so that its past is in transformers' own caches; Qwen 3 MoE's is in shared slots.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.core.experts import ExpertRows
from agentrl.engine.engine import Engine
from agentrl.engine.generate_api import parse_generate
from agentrl.engine.make_runner import make_runner
from agentrl.engine.model import ModelError, load_without_tokenizer
from agentrl.engine.params import BadRequestError, SamplingParams
from agentrl.engine.request import Request
from agentrl.engine.responses import meta_info
from agentrl.engine.service import Service
from agentrl.inference.routed_experts import read_numbers
from agentrl.models.decoder import decoder_of
from agentrl.models.routing import find_routers
from tests.engine.driving import SECONDS, Driver
from tests.engine.test_families import load
from tests.models.families import small_model

PASTS = {"mixtral": "caches", "qwen3_moe": "slots", "minimax": "recomputed"}
FILE = "model.safetensors"
PROMPT = [7, 9, 11, 5, 3, 8, 21, 30, 4, 6, 17, 33, 2, 50, 12, 19, 44, 41]  # longer than what the prefix cache keeps


def engine_of(name: str, folder: Path) -> Engine:
    loaded = load(name, folder)
    made = Engine(lambda: make_runner(loaded, 8, experts=True), max_running=8, seed=0, threads=1).start()
    made.ready.result(SECONDS)
    return made


@pytest.fixture(params=list(PASTS))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = engine_of(request.param, tmp_path)
    assert made.runner.past == PASTS[request.param]
    yield made
    assert made.stop(timeout=SECONDS)


def asking(driver: Driver, prompt: list[int], count: int, start: int = 0, **how: Any) -> Request:
    made = driver.make(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True), **how)
    made.experts_from = start
    return made


def chosen(model: Any, request: Request) -> Tensor:
    """Experts of all tokens but the last, in one forward pass over the whole sequence."""
    routers, ids = find_routers(model), [*request.prompt, *request.output][:-1]
    with routers.recorded() as taken, torch.no_grad():
        decoder_of(model)(input_ids=torch.tensor([ids]), use_cache=False)
    return taken[0]


def test_each_token_has_the_experts_of_the_models_own_forward_pass(engine: Engine, tmp_path: Path) -> None:
    """A group, other prompts beside it, answers of different lengths, and a prompt that begins as a kept one."""
    plain = load_without_tokenizer(str(tmp_path), "float32", "cpu", 64).model
    driver = Driver(engine)
    group = [asking(driver, PROMPT, count) for count in (3, 9, 5, 9)]
    others = [asking(driver, [6, 5], 4), asking(driver, PROMPT[:7], 6, start=3)]
    driver.run(*group, *others)
    later = asking(driver, [*PROMPT, *group[1].output[:4], 8, 9], 5, start=len(PROMPT) + 3)
    driver.run(later)
    for request in (*group, *others, later):
        assert request.experts is not None and request.experts.dtype == torch.int16
        assert torch.equal(request.experts, chosen(plain, request)[request.experts_from :])
    unasked = driver.make(PROMPT)
    driver.run(unasked)
    assert unasked.experts is None


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_push_within_an_answer_leaves_the_experts_of_earlier_tokens(
    mode: str, engine: Engine, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens of the old version keep the experts with which they were sampled, also where they are computed again."""
    old = load_without_tokenizer(str(tmp_path), "float32", "cpu", 64).model
    new = tmp_path_factory.mktemp("new")
    family = next(name for name, past in PASTS.items() if past == engine.runner.past)
    save_file({name: value.contiguous() for name, value in small_model(family, seed=1).named_parameters()}, new / FILE)
    driver = Driver(engine)
    pushed = []

    def push(request: Request) -> None:  # in the loop thread
        if len(request.output) == 4 and not pushed:
            pushed.append((engine.pause(mode), engine.load(str(new), "1"), engine.resume()))

    request = asking(driver, PROMPT, 9, on_token=push)
    driver.run(request)
    for future in pushed[0]:
        future.result(SECONDS)
    assert [span.version for span in request.spans] == ["0", "1"]
    before = request.spans[0].end
    assert request.experts is not None and len(request.experts) == len(PROMPT) + 8
    known = len(PROMPT) + before - 1
    assert torch.equal(request.experts[:known], chosen(old, request)[:known])


def test_an_answer_holds_them_as_sglangs_does(engine: Engine) -> None:
    driver = Driver(engine)
    request = asking(driver, PROMPT, 6, start=5)
    driver.run(request)
    told = meta_info(request, "0", logprobs=True)["routed_experts"]
    assert request.experts is not None
    assert read_numbers(told, len(PROMPT) + 6 - 1 - 5, "server") == ExpertRows.of(request.experts.numpy())


def test_a_call_asks_for_them_from_a_position_of_its_prompt(tmp_path: Path) -> None:
    engine = engine_of("qwen3_moe", tmp_path)
    try:
        service = Service(engine, str(tmp_path))
        body = {"input_ids": PROMPT, "return_routed_experts": True}
        assert parse_generate(body, service).prompts[0].experts_from == 0
        assert parse_generate(body | {"routed_experts_start_len": 4}, service).prompts[0].experts_from == 4
        assert parse_generate({"input_ids": PROMPT}, service).prompts[0].experts_from == -1
        with pytest.raises(BadRequestError, match="routed_experts_start_len"):
            parse_generate(body | {"routed_experts_start_len": len(PROMPT) + 1}, service)
    finally:
        assert engine.stop(timeout=SECONDS)


def test_a_server_that_was_not_started_for_it_refuses_the_call(tmp_path: Path) -> None:
    loaded = load("qwen3_moe", tmp_path)
    engine = Engine(lambda: make_runner(loaded, 2), max_running=2, threads=1).start()
    try:
        engine.ready.result(SECONDS)
        with pytest.raises(BadRequestError, match="--enable-return-routed-experts"):
            parse_generate({"input_ids": PROMPT, "return_routed_experts": True}, Service(engine, str(tmp_path)))
    finally:
        assert engine.stop(timeout=SECONDS)


def test_a_model_without_experts_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"trainer\.replay_routing.*no layer"):
        make_runner(load("llama", tmp_path), 2, experts=True)
