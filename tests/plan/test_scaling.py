"""The arithmetic of docs/scaling.md, and the sizes that it starts from."""

import json
import random
import tracemalloc
from pathlib import Path

import orjson
import pytest

from agentrl.core.episode import Node
from agentrl.plan.scaling import SIZES, Costs, Load, page_tables, scaled

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
VOCABULARY = 151_936


def test_the_page_holds_the_tables_that_are_computed() -> None:
    assert page_tables() in PAGE.read_text(encoding="utf-8"), f"put this into {PAGE}:\n{page_tables()}"


def test_a_request_sends_the_conversation_so_far() -> None:
    load = Load(calls=3, prompt=100, sampled=30, given=60)
    assert load.asked == 100 + 130 + 160
    assert load.tokens == 190


def test_the_bytes_of_an_arrow_are_those_of_its_messages() -> None:
    found = scaled(64, Load(in_flight=1000))
    arrows = {arrow.name: arrow for arrow in found.arrows}
    episodes = found.tokens_s / 4000
    assert arrows["servers to controller, answers"].nbytes == pytest.approx(34.0 * found.tokens_s)
    assert arrows["controller to trainer, batches"].largest == 500 * 6000 * 12.5
    assert found.step_s == pytest.approx(500 / episodes)
    weights = arrows["weights to servers"]
    assert weights.nbytes * found.step_s == pytest.approx(32 * 2 * 8.19e9, rel=0.001)
    assert weights.messages * found.step_s == pytest.approx(4 * 32)


def test_the_controller_is_as_busy_as_its_costs_say() -> None:
    costs = Costs(episode_s=0.001, call_s=0.002, token_s=1e-6)
    found = scaled(64, costs=costs)
    episodes = found.tokens_s / 4000
    (busy,) = [one.share for one in found.busy if one.name == "controller, one core"]
    assert busy == pytest.approx(episodes * (0.001 + 4 * 0.002 + 6000 * 1e-6))
    assert found.workers == max(1, -int(-episodes * 4 * 0.002 // 0.7))


def test_loads_grow_with_the_cards() -> None:
    shares = [{one.name: one.share for one in scaled(gpus).busy} for gpus in SIZES]
    for name in shares[0]:
        assert shares[0][name] < shares[1][name] < shares[2][name]


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def test_a_request_and_an_answer_have_the_bytes_that_are_counted() -> None:
    """Encoded as `inference/http.py` and `engine/responses.py` do."""
    body = orjson.dumps({"rid": "", "input_ids": ids(5000), "sampling_params": {}, "return_logprob": True})
    assert len(body) / 5000 == pytest.approx(Costs().asked_bytes, rel=0.05)
    rng = random.Random(1)
    pairs = [[-rng.expovariate(1.0), token, None] for token in ids(5000)]
    answer = orjson.dumps({"meta_info": {"output_token_logprobs": pairs}})
    assert len(answer) / 5000 == pytest.approx(Costs().answered_bytes, rel=0.1)


def test_a_running_episode_holds_the_memory_that_is_counted() -> None:
    """A node of sampled tokens, as it is decoded from an answer."""
    rng = random.Random(2)
    text = json.dumps([[-rng.expovariate(1.0), token] for token in ids(20_000)])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pairs = orjson.loads(text)
    node = Node(
        parent=None,
        message={"role": "assistant", "content": ""},
        token_ids=[token for _, token in pairs],
        loss_mask=[1] * len(pairs),
        logprobs=[logprob for logprob, _ in pairs],
        versions=[0] * len(pairs),
    )
    del pairs
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held / len(node.token_ids) == pytest.approx(Costs().held_bytes, rel=0.15)
