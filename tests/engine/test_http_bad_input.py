"""Whatever is sent, the answer is a 4xx and the engine lives on."""

import httpx

GENERATE = [
    b"",
    b"{",
    b"[1]",
    b"\xff\xfe",
    b"{}",
    b'{"input_ids": []}',
    b'{"input_ids": [[]]}',
    b'{"input_ids": [[1], 2]}',
    b'{"input_ids": "abc"}',
    b'{"input_ids": [1.5]}',
    b'{"input_ids": [true]}',
    b'{"input_ids": [-1]}',
    b'{"input_ids": [267]}',
    b'{"input_ids": [1e400]}',
    b'{"input_ids": [123456789012345678901234567890]}',
    b'{"input_ids": [1], "text": "a"}',
    b'{"text": 5}',
    b'{"text": ""}',
    b'{"text": [1, "a"]}',
    b'{"input_ids": [1], "rid": 5}',
    b'{"input_ids": [1], "stream": "yes"}',
    b'{"input_ids": [1], "return_logprob": 1}',
    b'{"input_ids": [1], "return_logprob": true, "logprob_start_len": 2}',
    b'{"input_ids": [1], "return_logprob": true, "logprob_start_len": "0"}',
    b'{"input_ids": [1], "top_logprobs_num": 3}',
    b'{"input_ids": [1], "lora_path": "x"}',
    b'{"input_ids": [1], "sampling_params": []}',
    b'{"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}',
    b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}',
    b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}',
    b'{"input_ids": [1], "sampling_params": {"unheard_of": 1}}',
    b'{"input_ids": [1], "sampling_params": {"n": 100000}}',
    b'{"input_ids": [[1], [2]], "sampling_params": [{}]}',
    b'{"input_ids": [[1], [2]], "rid": ["a", "a"]}',
]
CONTROL = {
    "/pause_generation": [b'{"mode": "sleep"}', b"5", b'{"mode": []}'],
    "/abort_request": [b"nope", b'{"rid": 5}', b'{"abort_all": "yes"}'],
    "/update_weights_from_disk": [
        b"{}",
        b'{"model_path": 5}',
        b'{"model_path": "/does/not/exist"}',
        b'{"model_path": "/tmp", "flush_cache": 3}',
        b'{"model_path": "/tmp", "weight_version": []}',
    ],
    "/update_weight_version": [b"{}", b'{"new_version": {}}'],
    "/weights_checker": [b"{}", b'{"action": "dance"}', b'{"action": []}'],
    "/get_weights_by_name": [b"{}", b'{"name": "nobody"}', b'{"name": "model.norm.weight", "truncate_size": -1}'],
    "/v1/completions": [b"{}", b'{"prompt": []}', b'{"prompt": [1, "a"]}', b'{"prompt": "a", "logprobs": 5}'],
}


def test_bad_bodies_are_400_and_the_engine_lives(client: httpx.Client) -> None:
    bodies = [("/generate", body) for body in GENERATE]
    bodies += [(path, body) for path, many in CONTROL.items() for body in many]
    for path, body in bodies:
        response = client.post(path, content=body)
        assert response.status_code == 400, (path, body, response.text)
        assert response.json()["error"]["message"], (path, body)
    assert client.get("/ready").status_code == 200
    answer = client.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert answer.status_code == 200


def test_a_prompt_beyond_the_context_is_answered_with_both_numbers(client: httpx.Client) -> None:
    response = client.post("/generate", json={"input_ids": [1] * 512})
    assert response.status_code == 400
    assert "512 tokens" in response.text and "context length is 512" in response.text
    capped = {"input_ids": [1] * 510, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    answer = client.post("/generate", json=capped).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_unknown_paths_and_methods_are_json_errors(client: httpx.Client) -> None:
    assert client.get("/nowhere").json()["error"]["code"] == 404
    assert client.get("/generate").json()["error"]["code"] == 405
