"""``/generate`` and the control plane over a real socket."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from agentrl.engine.engine import Engine
from tests.engine.driving import SECONDS

LONG = {"max_new_tokens": 400, "ignore_eos": True}


def generate(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/generate", json=body)


def events(response: httpx.Response) -> list:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_has_sglangs_fields(client: httpx.Client) -> None:
    params = {"max_new_tokens": 5, "ignore_eos": True}
    answer = generate(
        client, input_ids=[1, 2, 3], rid="mine", sampling_params=params, return_logprob=True, logprob_start_len=0
    ).json()
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 5
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (3, 5, "0")
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [1, 2, 3]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(logprob < 0 for logprob, _, _ in meta["output_token_logprobs"] + meta["input_token_logprobs"][1:])


def test_batches_and_samples_answer_lists_prompt_by_prompt(client: httpx.Client, engine: Engine) -> None:
    before = engine.runner.prefills
    params = {"max_new_tokens": 3, "n": 2, "ignore_eos": True, "sampling_seed": 1}
    answers = generate(client, input_ids=[[1, 2], [3]], sampling_params=params, return_prompt_token_ids=True).json()
    assert [answer["prompt_token_ids"] for answer in answers] == [[1, 2], [1, 2], [3], [3]]
    assert engine.runner.prefills == before + 2
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    again = generate(client, input_ids=[1, 2], sampling_params=params).json()
    assert [a["output_ids"] for a in again] == [a["output_ids"] for a in answers[:2]]


def test_a_stop_string_ends_the_text_but_stays_in_the_ids(client: httpx.Client, engine: Engine) -> None:
    params = {"max_new_tokens": 60, "temperature": 0.8, "sampling_seed": 2, "ignore_eos": True}
    free = generate(client, text="hello the user", sampling_params=params).json()
    stop = next(char for char in free["text"][3:] if char.isascii() and char.isprintable())
    cut = generate(client, text="hello the user", sampling_params={**params, "stop": [stop, "\u1234"]}).json()
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["output_ids"] == free["output_ids"][: len(cut["output_ids"])]
    assert stop in engine.runner.loaded.tokenizer.decode(cut["output_ids"])


def test_a_stream_is_cumulative_and_ends_like_the_plain_answer(client: httpx.Client) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 12, "sampling_seed": 3}, "return_logprob": True}
    plain = client.post("/generate", json=body).json()
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        chunks = events(response)
    for before, after in pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
    assert chunks[-1]["output_ids"] == plain["output_ids"] and chunks[-1]["text"] == plain["text"]
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == len(plain["output_ids"])


def test_pause_holds_new_requests_and_abort_returns_partial_ones(client: httpx.Client) -> None:
    with (
        ThreadPoolExecutor() as pool,
        client.stream("POST", "/generate", json={"input_ids": [1], "sampling_params": LONG, "stream": True}) as running,
    ):
        lines = running.iter_lines()
        next(lines)  # it runs
        assert client.post("/pause_generation", json={}).status_code == 200
        last = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"][-1]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(last["output_ids"]) < 400
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        assert client.get("/server_info").json()["paused"] is True
        held = pool.submit(generate, client, input_ids=[5], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
        client.post("/continue_generation", json={})
        assert len(held.result(SECONDS).json()["output_ids"]) == 2
        assert client.get("/ready").status_code == 200


def test_abort_request_ends_one_by_its_rid(client: httpx.Client) -> None:
    with client.stream(
        "POST", "/generate", json={"input_ids": [1], "rid": "x", "sampling_params": LONG, "stream": True}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
        assert client.post("/abort_request", json={"rid": "x"}).status_code == 200
        last = [line for line in lines if line][-2]
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_goes_away_aborts_its_request(client: httpx.Client, engine: Engine) -> None:
    for stream in (True, False):
        body = {"input_ids": [1], "rid": f"gone{stream}", "sampling_params": {**LONG, "n": 4}, "stream": stream}
        if stream:
            with client.stream("POST", "/generate", json=body) as response:
                next(response.iter_lines())
        else:
            engine.pause("in_place").result(SECONDS)
            with pytest.raises(httpx.ReadTimeout):
                client.post("/generate", json=body, timeout=0.2)
            engine.resume().result(SECONDS)
        while engine.call(lambda: len(engine.scheduler.unfinished)).result(SECONDS):
            pass
        assert engine.runner.decodes < 200  # long before 400 tokens


def test_weights_are_replaced_over_http(client: httpx.Client, other: Path) -> None:
    greedy = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    before = generate(client, input_ids=[1, 2], sampling_params=greedy).json()
    prints = client.post("/weights_checker", json={"action": "fingerprint"}).json()["fingerprints"]
    answer = client.post("/update_weights_from_disk", json={"model_path": str(other), "weight_version": "v1"}).json()
    assert answer["success"] is True and answer["seconds"] > 0
    after = generate(client, input_ids=[1, 2], sampling_params=greedy).json()
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == client.get("/model_info").json()["weight_version"] == "v1"
    changed = client.post("/weights_checker", json={"action": "fingerprint"}).json()["fingerprints"]
    assert changed.keys() == prints.keys() and changed != prints
    rows = client.post("/get_weights_by_name", json={"name": "model.norm.weight", "truncate_size": 3}).json()
    assert rows == [1.0, 1.0, 1.0]
    assert client.post("/update_weight_version", json={"new_version": "v2"}).json()["success"] is True
    assert client.get("/model_info").json()["weight_version"] == "v2"
    assert client.post("/flush_cache").status_code == 200
    assert client.get("/server_info").json()["cache_bytes"] == 0


def test_a_failed_step_is_500_with_its_message(client: httpx.Client, engine: Engine) -> None:
    decode = engine.runner.decode

    def broken(*args: object) -> None:
        engine.runner.decode = decode  # type: ignore[method-assign]
        raise RuntimeError("out of luck")

    engine.runner.decode = broken  # type: ignore[method-assign,assignment]
    answer = generate(client, input_ids=[1], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    assert answer.status_code == 500 and "out of luck" in answer.json()["error"]["message"]
    assert generate(client, input_ids=[1]).status_code == 200
