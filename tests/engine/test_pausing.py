"""Pause modes, aborts and failing steps, at exact tokens."""

import pytest
import torch

from agentrl.engine.engine import QueueFullError
from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Request
from tests.engine.driving import SECONDS, Driver, reference_logprobs

SEEDED = SamplingParams(max_new_tokens=16, ignore_eos=True, sampling_seed=5)


def at(count: int, action):
    """An ``on_token`` that acts once, after ``count`` tokens."""

    def on_token(request: Request) -> None:
        if len(request.output) == count:
            action()

    return on_token


def test_abort_mode_returns_everything_at_once_with_what_it_has(driver: Driver) -> None:
    engine = driver.engine
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    running = [driver.make([i], params) for i in range(7)]
    running.append(driver.make([7], params, on_token=at(3, lambda: engine.pause("abort"))))
    waiting = driver.make([99], params)
    driver.run(*running, waiting)
    assert {request.finish.kind for request in [*running, waiting]} == {"abort"}  # type: ignore[union-attr]
    assert len(running[7].output) == 3
    assert waiting.output == []
    assert engine.paused and engine.scheduler.unfinished == []


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_as_if_nothing_happened(driver: Driver, reference: torch.nn.Module, mode: str) -> None:
    engine = driver.engine
    (untouched,) = driver.run(driver.make([4, 5], SEEDED))
    prefills = engine.runner.prefills
    paused = []
    request = driver.make([4, 5], SEEDED, on_token=at(6, lambda: paused.append(engine.pause(mode))))
    engine.submit([request])
    while not paused or not paused[0].done():
        engine.call(lambda: None).result(SECONDS)  # one turn of the loop
    held = driver.make([8, 8], SEEDED)
    engine.submit([held])
    steps = engine.call(lambda: engine.runner.decodes).result(SECONDS)
    assert engine.call(lambda: engine.runner.decodes).result(SECONDS) == steps
    assert len(request.output) == 6 and held.output == []
    engine.resume().result(SECONDS)
    driver.wait(request, held)
    assert request.output == untouched.output
    assert request.retractions == (1 if mode == "retract" else 0)
    assert engine.runner.prefills == prefills + 1 + 1 + request.retractions
    exact = reference_logprobs(reference, request)
    assert (torch.tensor(request.logprobs).double() - exact).abs().max() < 1e-4


def test_aborting_one_request_leaves_the_others_exact(driver: Driver, reference: torch.nn.Module) -> None:
    engine = driver.engine
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    victim = driver.make([1], params)
    others = [driver.make([2, i], params, on_token=at(5, lambda: engine.abort(victim.rid))) for i in range(3)]
    driver.run(victim, *others)
    assert victim.finish is not None and victim.finish.kind == "abort"
    assert 0 < len(victim.output) < 30
    for request in others:
        assert len(request.output) == 30
        assert (torch.tensor(request.logprobs).double() - reference_logprobs(reference, request)).abs().max() < 1e-4
    assert engine.abort("unknown").result(SECONDS) == 0


def test_a_failing_step_fails_its_requests_and_the_loop_goes_on(driver: Driver) -> None:
    runner = driver.engine.runner
    decode = runner.decode

    def broken(*args: object) -> torch.Tensor:
        runner.decode = decode  # type: ignore[method-assign]
        raise RuntimeError("out of luck")

    runner.decode = broken  # type: ignore[method-assign,assignment]
    (failed,) = driver.run(driver.make([1]))
    assert failed.finish is not None and failed.finish.kind == "error"
    assert "out of luck" in failed.finish.message
    (after,) = driver.run(driver.make([1]))
    assert len(after.output) == 8


def test_a_full_queue_and_a_rid_in_use_are_refused(driver: Driver) -> None:
    engine = driver.engine
    engine.pause("retract").result(SECONDS)
    engine.submit([driver.make([1]) for _ in range(71)])
    last = driver.make([1])
    engine.submit([last])
    with pytest.raises(QueueFullError):
        engine.submit([driver.make([1])])
    engine.abort(everything=True).result(SECONDS)
    twin = driver.make([1])
    engine.submit([twin])
    with pytest.raises(ValueError, match=twin.rid):
        engine.submit([twin])
