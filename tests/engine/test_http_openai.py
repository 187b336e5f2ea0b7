"""OpenAI's endpoints over a real socket."""

import json
from pathlib import Path

import httpx
import pytest

from agentrl.engine.engine import Engine

HI = [{"role": "user", "content": "hi the user"}]


def chat(client: httpx.Client, **body: object) -> dict:
    response = client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 6, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()


def deltas(client: httpx.Client, path: str, body: dict) -> list[dict]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_chat_returns_the_exact_ids_of_prompt_and_output(client: httpx.Client, engine: Engine) -> None:
    tokenizer = engine.runner.loaded.tokenizer
    answer = chat(client, return_token_ids=True, return_meta_info=True, ignore_eos=True, logprobs=True)
    (choice,) = answer["choices"]
    text = "<|im_start|>user\nhi the user<|im_end|>\n<|im_start|>assistant\n"
    assert choice["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)
    assert choice["message"]["content"] == tokenizer.decode(choice["response_token_ids"], skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    pairs = choice["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in pairs] == choice["response_token_ids"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [logprob for logprob, _, _ in pairs]
    prompt = len(choice["prompt_token_ids"])
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert answer["metadata"]["weight_version"] == "0"


def test_input_ids_bypass_the_template(client: httpx.Client) -> None:
    answer = chat(client, input_ids=[5, 6, 7], return_token_ids=True, max_completion_tokens=2, max_tokens=9)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["response_token_ids"]) <= 2


def test_content_parts_are_joined_and_stop_is_reported(client: httpx.Client, engine: Engine) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "the user"}]}]
    plain, joined = chat(client), chat(client, messages=parts)
    assert plain["choices"][0]["message"] == joined["choices"][0]["message"]
    (eos,) = engine.runner.loaded.eos_ids
    answer = chat(client, max_tokens=480, temperature=100, seed=3, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["matched_stop"] == eos
    assert choice["response_token_ids"][-1] == eos
    assert "<|im_end|>" not in choice["message"]["content"]


def test_a_calls_arguments_are_the_same_as_text_and_as_an_object(client: httpx.Client, engine: Engine) -> None:
    engine.runner.loaded.tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )

    def prompt(arguments: object) -> list[int]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return chat(client, messages=[*HI, said], return_token_ids=True)["choices"][0]["prompt_token_ids"]

    as_object = prompt({"a": "b"})
    assert prompt('{"a": "b"}') == as_object
    assert '{"a": "b"}' in engine.runner.loaded.tokenizer.decode(as_object)


def test_streamed_deltas_join_to_the_plain_text(client: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 30, "seed": 4, "n": 2, "stream_options": {"include_usage": True}}
    plain = client.post("/v1/chat/completions", json=body).json()
    chunks = deltas(client, "/v1/chat/completions", body)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain["usage"]
    for choice in plain["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[0]["delta"]["role"] == "assistant"


def test_completions_take_text_ids_and_batches(client: httpx.Client) -> None:
    body = {"prompt": [[1, 2], [3]], "max_tokens": 4, "return_token_ids": True, "logprobs": 1, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 2], [3]]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [4, 4]
    assert all(len(choice["logprobs"]["token_logprobs"]) == 4 for choice in answer["choices"])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    text = {"prompt": "hi", "max_tokens": 20, "seed": 1}
    plain = client.post("/v1/completions", json=text).json()["choices"][0]["text"]
    assert "".join(c["choices"][0]["text"] for c in deltas(client, "/v1/completions", text)) == plain


def test_a_model_without_a_template_says_so(client: httpx.Client, engine: Engine) -> None:
    engine.runner.loaded.tokenizer.chat_template = None
    response = client.post("/v1/chat/completions", json={"messages": HI})
    assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
    assert len(chat(client, input_ids=[1, 2], ignore_eos=True, return_token_ids=True)["choices"]) == 1


def test_models_names_the_folder(client: httpx.Client, tiny: Path) -> None:
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [str(tiny)]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": HI, "max_tokens": -1},
        {"messages": HI, "temperature": "hot"},
        {"messages": HI, "top_logprobs": 3},
        {"messages": HI, "tool_choice": "required"},
        {"messages": HI, "response_format": {"type": "json_object"}},
        {"messages": HI, "stream": True, "return_token_ids": True},
        {"messages": HI, "input_ids": [99999]},
        {"messages": HI, "chat_template_kwargs": []},
    ],
)
def test_bad_chat_bodies_are_400(client: httpx.Client, body: dict) -> None:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]
