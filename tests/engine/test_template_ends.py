"""The end of a template's turn, on a real embedded engine whose model names another."""

from dataclasses import replace
from pathlib import Path

import httpx
from transformers import AutoTokenizer

from agentrl.engine.engine import Engine
from agentrl.inference.backend import SamplingParams
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from tests.tiny import CHATML

USER = {"role": "user", "content": "hello"}
PARAMS = SamplingParams(max_new_tokens=400, temperature=1e6)  # every token is as likely as the others


async def test_an_answer_ends_at_the_templates_end_which_is_trained_and_stands_there_once(
    client: httpx.Client, tiny: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|endoftext|>")
    template = ChatTemplate(tokenizer)  # the model's own end is <|im_end|>
    (end,) = template.stop_ids
    backend = EmbeddedBackend(str(client.base_url), 60.0)
    ended = 0
    for seed in range(12):
        sampling = replace(PARAMS, seed=seed, stop=template.stop_texts, stop_token_ids=template.stop_ids)
        session = ChatSession(backend, template, SessionSettings(sampling, 480, locked=True, model="m"))
        await session.create(messages=[USER])
        node = session.trajectory.nodes[-1]
        assert node.token_ids.count(end) == node.token_ids[-1:].count(end)
        if node.token_ids[-1] == end:
            ended += 1
            assert node.finish_reason == "stop" and node.loss_mask == [1] * len(node.token_ids)
            added = template.following([USER], answered=node.message, answer_ids=node.token_ids)
            assert added[0] != end, "it is not put in a second time"
    await backend.close()
    assert ended >= 2


def chat(client: httpx.Client, **body: object) -> dict:
    given = {"messages": [USER], "max_tokens": 400, "temperature": 1e6, "return_token_ids": True}
    response = client.post("/v1/chat/completions", json={**given, **body})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def test_the_engines_own_chat_stops_there_too(client: httpx.Client, engine: Engine) -> None:
    """A base model's configuration names another end: its chat answers went on with made-up turns."""
    tokenizer = engine.runner.loaded.tokenizer
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|endoftext|>")
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for extra in ({}, {"input_ids": [5, 6]}):
        found = [chat(client, seed=seed, **extra) for seed in range(8)]
        assert any(choice["matched_stop"] == end for choice in found)
        assert all(end not in choice["response_token_ids"][:-1] for choice in found)
        assert all("<|endoftext|>" not in choice["message"]["content"] for choice in found)
    free = [chat(client, seed=seed, ignore_eos=True)["response_token_ids"] for seed in range(8)]
    assert any(end in ids[:-1] for ids in free), "ignore_eos is without any end"
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "Q").replace("<|im_start|>", "U")
    said = [chat(client, seed=seed) for seed in range(8)]
    assert any(choice["matched_stop"] == "Q" for choice in said)
    assert not any("Q" in choice["message"]["content"] for choice in said)


def test_a_template_without_an_assistants_turn_has_no_end(client: httpx.Client, engine: Engine) -> None:
    engine.runner.loaded.tokenizer.chat_template = "{{ messages[0].content }}"
    assert chat(client, max_tokens=3)["finish_reason"] in ("length", "stop")


async def test_an_answer_ends_at_text_where_no_token_ends_a_turn(client: httpx.Client, tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    source = CHATML.replace("<|im_end|>", "Q").replace("<|im_start|>", "U")  # a letter, so that a random model says it
    tokenizer.chat_template = source
    template = ChatTemplate(tokenizer)
    assert template.stop_texts == ("Q",)
    backend = EmbeddedBackend(str(client.base_url), 60.0)
    found = []
    for seed in range(12):
        sampling = replace(PARAMS, seed=seed, stop=template.stop_texts, stop_token_ids=template.stop_ids)
        session = ChatSession(backend, template, SessionSettings(sampling, 480, locked=True, model="m"))
        said = (await session.create(messages=[USER])).choices[0].message.content
        node = session.trajectory.nodes[-1]
        text = template.text(node.token_ids, special=True)
        if "Q" in text:
            found.append(text)
            assert node.finish_reason == "stop" and "Q" not in said
            assert "Q" not in template.text(node.token_ids[:-1], special=True), "nothing was sampled behind it"
    await backend.close()
    assert len(found) >= 2
