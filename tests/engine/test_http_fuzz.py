"""Anything may come over HTTP: wrong types, huge values, half requests, closed connections. The engine goes on."""

import contextlib
import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

PATHS = [
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/abort_request",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
    "/weights_checker",
    "/get_weights_by_name",
    "/tokenize",
]
KEYS = [
    "input_ids", "text", "prompt", "messages", "sampling_params", "max_tokens", "max_completion_tokens", "n", "stop",
    "stream", "logprobs", "return_logprob", "logprob_start_len", "rid", "temperature", "seed", "model", "tools", "name",
    "names", "shapes", "dtypes", "group_name", "model_path", "action", "truncate_size", "stream_options", "echo",
]  # fmt: skip
SAMPLING = ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "sampling_seed"]
numbers = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**31, -(2**63), 2**64, 10**30, 1e308, -1e-320, 0.5]),
    st.booleans(),
    st.none(),
)
scalars = st.one_of(numbers, st.text(max_size=6), st.sampled_from(["user", "text", "float32", "\ud800", "\x00"]))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*SAMPLING, "role", "content", "type", "function"]), inner, max_size=4),
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)
FEW = settings(
    max_examples=150, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


def lives(client: httpx.Client) -> None:
    answer = client.post(
        "/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    )
    assert answer.status_code == 200 and answer.json()["meta_info"]["completion_tokens"] == 2


@FEW
@given(path=st.sampled_from(PATHS), body=bodies)
def test_any_json_is_answered_without_a_server_error(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    assert response.status_code < 500, (path, body, response.text)


@FEW
@given(
    start=st.fixed_dictionaries({"input_ids": st.lists(st.integers(0, 250), min_size=1, max_size=5)}),
    sampling=st.dictionaries(st.sampled_from(SAMPLING), numbers, max_size=5),
    rest=st.dictionaries(st.sampled_from(["stream", "return_logprob", "logprob_start_len"]), numbers, max_size=3),
)
def test_any_sampling_options_are_answered(
    client: httpx.Client, start: dict[str, Any], sampling: dict[str, Any], rest: dict[str, Any]
) -> None:
    """Closer to what is valid: many of these really run."""
    sampling.setdefault("max_new_tokens", 3)
    body = {**start, **rest, "sampling_params": sampling}
    response = client.post("/generate", content=json.dumps(body).encode())
    assert response.status_code < 500, (body, response.text)


def test_bytes_that_are_no_request_and_connections_that_close(client: httpx.Client) -> None:
    whole = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        whole
    )
    pieces = [
        b"",
        b"\x00\xff" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        head,
        head + whole[:20],
        head + whole,
        head.replace(b"content-length: ", b"content-length: -"),
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\n" + b"x" * 100_000,
    ]
    for piece in pieces * 4:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((client.base_url.host, client.base_url.port)) as raw,
        ):
            raw.sendall(piece)
            raw.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
            )  # reset, not closed
    lives(client)
    info = client.get("/server_info").json()
    assert info["failed_steps"] == 0


@pytest.fixture(autouse=True)
def _lives_on(client: httpx.Client):
    yield
    lives(client)
    assert client.get("/health").status_code == 200
