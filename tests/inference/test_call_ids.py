"""Ids of calls in the form that a template takes: Kimi K2's hold the name, Mistral's have nine letters and digits."""

import json
from typing import Any

import pytest

from agentrl.core.call_form import call_form
from agentrl.core.episode import Message
from agentrl.inference.backend import SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.supervised.examples import Sample
from agentrl.supervised.tokens import Encoder
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_template_zoo import FILES, TOOLS, load
from tests.inference.tokenizer_kinds import KINDS

USER: Message = {"role": "user", "content": "Which?"}
MISTRAL = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id is not defined or c.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{% endif %}{{ m.content }}</s>{% endfor %}"
)


def mistral() -> ChatTemplate:
    tokenizer = KINDS["bytes"](["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]"])
    tokenizer.chat_template = MISTRAL
    return ChatTemplate(tokenizer)


def calls(*ids: str | None) -> Message:
    made: list[dict[str, Any]] = [
        {"id": one, "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": str(at)})}}
        for at, one in enumerate(ids)
    ]
    shown = [{key: value for key, value in call.items() if value is not None} for call in made]
    return {"role": "assistant", "content": "", "tool_calls": shown}


def result(call_id: str | None, content: str) -> Message:
    made: Message = {"role": "tool", "name": "add", "tool_call_id": call_id, "content": content}
    return {key: value for key, value in made.items() if value is not None}


def example(*ids: str | None) -> list[Message]:
    """Two turns of calls with these ids each, and their results in the opposite order where they have ids."""
    results = [result(one, f"r{at}") for at, one in enumerate(ids)]
    turn = [calls(*ids), *(reversed(results) if None not in ids else results)]
    return [USER, *turn, *turn, USER]


@pytest.mark.parametrize("ids", [("made_a", "made_b"), ("call00000", "call00001"), (None, None)])
def test_kimi_gets_ids_that_hold_the_name_and_count_the_calls(ids: tuple[str | None, ...]) -> None:
    template = load("kimi_k2")
    assert template.call_form.ids == "named"
    text = template.text(template.first(example(*ids), TOOLS), special=True)
    for number, at in enumerate((0, 1, 0, 1)):
        own = f"functions.add:{number}"
        assert f'<|tool_call_begin|>{own}<|tool_call_argument_begin|>{{"a": "{at}"}}' in text
        assert f"Return of {own}\nr{at}" in text, "a result names its own call"


def test_ids_that_hold_the_name_stay_with_kimi() -> None:
    template = load("kimi_k2")
    text = template.text(template.first(example("functions.add:7", "add:8"), TOOLS), special=True)
    assert text.count("functions.add:7") == 4 and text.count("add:8") == 4 and "add:0" not in text


async def test_an_example_goes_before_the_models_own_calls() -> None:
    template = load("kimi_k2")
    call = '<think></think><|tool_call_begin|>functions.add:5<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>'
    backend = FakeBackend(lambda ids, params: answer([*template.encode(call), template.eos_id]))
    settings = SessionSettings(SamplingParams(max_new_tokens=900), 100_000, locked=True, model="m")
    chat = ChatSession(backend, template, settings)
    before = [USER, calls("made_a"), result("made_a", "r"), USER]
    said = (await chat.create(messages=before, tools=TOOLS)).choices[0].message
    (made,) = said.tool_calls
    assert made.id == "functions.add:5"
    await chat.create(messages=[*before, said, result(made.id, "own")], tools=TOOLS)
    prompt = template.text(backend.requests[-1][0], special=True)
    assert "Return of functions.add:0\nr" in prompt and "Return of functions.add:5\nown" in prompt


@pytest.mark.parametrize("load_one", [lambda: load("kimi_k2"), mistral])
def test_an_example_to_learn_from_is_encoded_turn_by_turn_with_the_same_ids(load_one: Any) -> None:
    template = load_one()
    messages = [USER, calls("made_a", "made_b"), result("made_b", "r1"), result("made_a", "r0"), calls("made_a"),
                result("made_a", "r2"), {"role": "assistant", "content": "done"}]  # fmt: skip
    encoded = Encoder(template).sample(Sample(messages, 0, TOOLS))
    learned = [token for token, mask in zip(encoded.ids, encoded.learned, strict=True) if mask]
    text = template.text(learned, special=True)
    assert text.count('{"a": "0"}') == 2 and text.count('{"a": "1"}') == 1 and "made_a" not in text


@pytest.mark.parametrize("ids", [("made_a", "made_b"), ("123456789", "call_abcdefgh"), (None, None)])
def test_mistral_gets_nine_letters_and_digits_and_keeps_those_that_are(ids: tuple[str | None, ...]) -> None:
    template = mistral()
    assert template.call_form.ids == "nine"
    text = template.text(template.first(example(*ids), TOOLS), special=True)
    assert all(one is None or (one in text) == (len(one) == 9) for one in ids)
    found = [part.split("[ARGS]")[0] for part in text.split("[CALL_ID]")[1:]]
    assert len(set(found)) == len(found) or ids[0] == "123456789", "new ids are all different"
    assert [len(one) for one in found] == [9] * 4
    for one, at in zip(found, (0, 1, 0, 1), strict=True):
        assert f"[TOOL_RESULTS]{one}[TOOL_CONTENT]r{at}" in text


def test_other_templates_get_ids_as_they_were_given() -> None:
    for name in ("qwen3", "mistral_v11", "llama3_1", "gptoss", "deepseek_v3_1"):
        assert load(name).call_form.ids == "any", name
    assert call_form(lambda messages: None).ids == "any", "a template without calls"
    text = load("mistral_v11").text(load("mistral_v11").first(example("made_a"), TOOLS), special=True)
    assert text.count("made_a") == 4 and "kimi" not in FILES["mistral_v11"].read_text()
