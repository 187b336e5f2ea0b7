"""Ten thousand requests of all kinds: memory stays flat and nothing is left behind."""

import random
import resource
import sys
import threading
from pathlib import Path

import pytest

from agentrl.engine.engine import Engine
from agentrl.engine.model import load_model
from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Request
from agentrl.engine.runner import ModelRunner
from tests.engine.driving import SECONDS, Driver

REQUESTS, WARM, AT_ONCE = 10_000, 2_000, 40
GROWTH = 1.05


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_over_ten_thousand_requests(tiny: Path, other: Path) -> None:
    engine = Engine(
        lambda: ModelRunner(load_model(str(tiny), "float32", "cpu"), 16, 2048),
        max_running=16,
        max_tokens=2000,
        threads=1,
    ).start()
    engine.ready.result(SECONDS)
    driver, rng, room = Driver(engine), random.Random(0), threading.Semaphore(AT_ONCE)
    history: list[tuple[int, ...]] = [(1, 2, 3)]
    kinds: dict[str, int] = {}

    def ended(request: Request) -> None:
        if request.finish is not None:
            kinds[request.finish.kind] = kinds.get(request.finish.kind, 0) + 1
            history.append((*request.prompt, *request.output))
            del history[:-50]
            room.release()

    warm = 0
    for number in range(REQUESTS):
        assert room.acquire(timeout=SECONDS)
        begun = rng.choice(history)[: rng.randrange(150)] if rng.random() < 0.5 else ()
        prompt = [*begun, *(rng.randrange(250) for _ in range(rng.randint(1, 120)))]
        params = SamplingParams(max_new_tokens=rng.randrange(40), ignore_eos=rng.random() < 0.5)
        request = driver.make(prompt, params, logprob_start=rng.choice([-1, -1, 0, 5]) if len(prompt) > 5 else -1)
        request.on_update = ended
        engine.submit([request])
        if rng.random() < 0.05:
            engine.abort(request.rid)
        if number % 500 == 499:
            engine.pause(rng.choice(["abort", "retract", "in_place"]))
            engine.load(str(rng.choice([tiny, other])), str(number))
            engine.resume()
        if number == WARM:
            warm = resident_bytes()
    for _ in range(AT_ONCE):
        assert room.acquire(timeout=SECONDS)
    print(f"{kinds}; resident {warm / 2**20:.0f} MiB after {WARM}, {resident_bytes() / 2**20:.0f} after {REQUESTS}")
    assert sum(kinds.values()) == REQUESTS and set(kinds) == {"stop", "length", "abort"}
    assert engine.call(lambda: engine.scheduler.unfinished).result(SECONDS) == []
    assert engine.runner.kept.tokens <= 2048
    assert resident_bytes() <= warm * GROWTH
    assert engine.stop(timeout=SECONDS)
