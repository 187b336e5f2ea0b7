"""Why and where a request ends."""

import pytest

from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Finish, StopText
from tests.engine.driving import Driver

GREEDY = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)


def test_a_stop_id_ends_the_output_and_is_part_of_it(driver: Driver) -> None:
    (free,) = driver.run(driver.make([1, 2, 3], GREEDY))
    assert free.finish == Finish("length")
    stop = free.output[4]
    first = free.output.index(stop)
    params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    (stopped,) = driver.run(driver.make([1, 2, 3], params))
    assert stopped.output == free.output[: first + 1]
    assert stopped.finish == Finish("stop", matched=stop)


def test_every_end_token_of_the_model_stops_unless_ignored(driver: Driver) -> None:
    (eos,) = driver.loaded.eos_ids
    hot = SamplingParams(max_new_tokens=400, temperature=50.0, sampling_seed=3)
    (request,) = driver.run(driver.make([1], hot))
    assert request.finish == Finish("stop", matched=eos)
    assert request.output[-1] == eos and eos not in request.output[:-1]
    ignoring = SamplingParams(max_new_tokens=400, temperature=50.0, sampling_seed=3, ignore_eos=True)
    (longer,) = driver.run(driver.make([1], ignoring))
    assert longer.output[: len(request.output)] == request.output
    assert longer.finish == Finish("length")


def test_min_new_tokens_keeps_stop_tokens_out(driver: Driver) -> None:
    every_even = tuple(range(0, 267, 2))
    params = SamplingParams(max_new_tokens=40, min_new_tokens=9, stop_token_ids=every_even, sampling_seed=0)
    (request,) = driver.run(driver.make([1], params))
    assert all(token % 2 for token in request.output[:9])
    assert request.finish is not None and request.finish.kind == "stop"
    assert len(request.output) > 9


def test_the_context_caps_the_output(driver: Driver) -> None:
    (request,) = driver.run(driver.make(list(range(260)) + [1] * 247, GREEDY))
    assert request.finish == Finish("length")
    assert len(request.output) == 512 - 507


@pytest.mark.parametrize("stop", ["b", "lo w", "world!"])
def test_a_stop_string_is_found_across_tokens(stop: str) -> None:
    pieces = ["hel", "lo", " ", "wor", "ld", "!", "b"]
    watch = StopText((stop, "never"), lambda ids: "".join(pieces[i] for i in ids))
    seen = []
    for token in range(len(pieces)):
        matched = watch.push(token)
        seen.append(token)
        if matched:
            break
    assert matched == stop
    text = "".join(pieces)
    assert watch.cut == text.index(stop)
    assert len("".join(pieces[:-1][: len(seen) - 1])) < text.index(stop) + len(stop)


def test_a_character_of_several_tokens_waits_for_its_last_byte() -> None:
    raw = "aé日".encode()
    watch = StopText(("日",), lambda ids: bytes(raw[i] for i in ids).decode(errors="replace"))
    found = [watch.push(token) for token in range(len(raw))]
    assert found == [None] * (len(raw) - 1) + ["日"]
    assert watch.text == "aé日"
