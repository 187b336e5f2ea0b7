"""The end of a template's turn, on a real embedded engine whose model names another."""

from dataclasses import replace
from pathlib import Path

import httpx
from transformers import AutoTokenizer

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
