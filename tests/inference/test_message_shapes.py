"""Every template of the zoo gives the same ids for a message in each of its legal shapes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from agentrl.core.message_shape import MessageError
from agentrl.inference.backend import SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import TemplateError
from agentrl.supervised.examples import sample_of
from agentrl.supervised.tokens import Encoder
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_template_zoo import NAMES, NO_TOOLS, TOOLS, load, tools_of

Message = dict[str, Any]
ARGUMENTS = {"a": "wörd", "b": [1, {"c": None}]}
USER = {"role": "user", "content": "one two"}
SAID = {"role": "assistant", "content": "three four"}
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)},
}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "five six"}


def parts(message: Message) -> Message:
    first, second = message["content"].split(" ")
    texts = [{"type": "text", "text": f"{first} "}, {"type": "text", "text": second}]
    return {**message, "content": texts}


TALK: dict[str, Callable[[], list[Any]]] = {
    "parts": lambda: [parts(USER), parts(SAID), parts(USER)],
    "no calls": lambda: [USER, {**SAID, "tool_calls": None, "refusal": None, "function_call": None}, USER],
    "no calls in a list": lambda: [{**USER, "name": None}, {**SAID, "tool_calls": [], "annotations": []}, USER],
    "openai's object": lambda: [USER, ChatCompletionMessage(role="assistant", content="three four"), USER],
    "a refusal": lambda: [USER, {"role": "assistant", "content": None, "refusal": "three four"}, USER],
    "a refusal in parts": lambda: [
        USER,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "three four"}]},
        USER,
    ],
}
CALLED: dict[str, Callable[[], list[Any]]] = {
    "content is null": lambda: [USER, {**CALLING, "content": None}, RESULT],
    "content is missing": lambda: [USER, {key: CALLING[key] for key in ("role", "tool_calls")}, RESULT],
    "content has no parts": lambda: [USER, {**CALLING, "content": []}, RESULT],
    "arguments are an object": lambda: [USER, with_arguments(ARGUMENTS), RESULT],
    "a result in parts": lambda: [parts(USER), CALLING, parts(RESULT)],
    "openai's object": lambda: [USER, ChatCompletionMessage.model_validate({**CALLING, "content": None}), RESULT],
    "calls as objects": lambda: [
        USER,
        {**CALLING, "tool_calls": ChatCompletionMessage.model_validate(CALLING).tool_calls},
        RESULT,
    ],
    "a call without an envelope": lambda: [
        USER,
        {**CALLING, "tool_calls": [{"id": "call00000", **CALL["function"]}]},
        RESULT,
    ],
}


def with_arguments(arguments: Any) -> Message:
    return {**CALLING, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": arguments}}]}


async def ids(name: str, messages: list[Any], tools: bool = False) -> list[int]:
    """The ids that a session sends for a conversation that starts with these messages."""
    template = load(name)
    backend = FakeBackend(lambda ids, params: answer([template.eos_id]))
    settings = SessionSettings(SamplingParams(max_new_tokens=20), 1_000_000, locked=True, model="m")
    await ChatSession(backend, template, settings).create(
        messages=messages, **({"tools": tools_of(name)} if tools else {})
    )
    return backend.requests[0][0]


@pytest.mark.parametrize("name", NAMES)
async def test_a_turn_has_the_same_ids_in_each_shape(name: str) -> None:
    plain = await ids(name, [USER, SAID, USER])
    assert "three four" in load(name).tokenizer.decode(plain)
    for shape, made in TALK.items():
        assert await ids(name, made()) == plain, shape


NAMED_CALLS = [name for name in NAMES if not NO_TOOLS.search(name)]


@pytest.mark.parametrize("name", NAMED_CALLS)
async def test_a_call_has_the_same_ids_in_each_shape_and_is_encoded_once(name: str) -> None:
    plain = await ids(name, [USER, CALLING, RESULT], tools=True)
    text = load(name).tokenizer.decode(plain)
    assert "wörd" in text and "five six" in text
    assert '\\"' not in text and "{'a'" not in text, "arguments encoded twice, or as Python writes them"
    for shape, made in CALLED.items():
        assert await ids(name, made(), tools=True) == plain, shape


@pytest.mark.parametrize("name", NAMED_CALLS)
async def test_the_old_form_of_a_call_is_a_call_and_its_result(name: str) -> None:
    old = [
        USER,
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "add", "content": "five six"},
    ]
    text = load(name).tokenizer.decode(await ids(name, old, tools=True))
    assert "wörd" in text and "five six" in text and '\\"' not in text


@pytest.mark.parametrize("name", NAMED_CALLS)
async def test_broken_arguments_are_given_as_they_are_or_refused(name: str) -> None:
    try:
        text = load(name).tokenizer.decode(await ids(name, [USER, with_arguments("{wörd"), RESULT], tools=True))
    except TemplateError as error:
        assert "'add' are not a JSON object" in str(error)
    else:
        assert "{wörd" in text


@pytest.mark.parametrize("shape", ["arguments are an object", "content is null", "calls as objects"])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "llama3_1", "chatml_tools", "gptoss"])
def test_examples_have_the_same_ids_in_each_shape(name: str, shape: str) -> None:
    template = load(name)

    def learned(messages: list[Any]) -> Any:
        sample = sample_of({"messages": messages, "tools": TOOLS})
        assert sample is not None
        return Encoder(template).sample(sample)

    plain = learned([USER, CALLING])
    text = template.tokenizer.decode(plain.ids)
    assert "look_up" in text and "wörd" in text and '\\"' not in text
    assert learned(CALLED[shape]()[:2]) == plain


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "user message .*'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "user message .*'input_audio'"),
        ({"role": "assistant", "content": None, "audio": {"id": "x"}}, "assistant message holds audio"),
        ({"role": "user", "content": {"text": "x"}}, "user message's content is dict"),
        ({"role": "user", "content": None}, "user message has no content"),
        ({"role": "tool", "tool_call_id": "x"}, "tool message has no content"),
        ({**USER, "tool_calls": [CALL]}, "only the assistant makes"),
        ({**CALLING, "function_call": CALL["function"]}, "leave out function_call"),
        ({**SAID, "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "x"}}]}, "of type 'custom'"),
    ],
)
async def test_what_a_text_model_cannot_read_is_refused_with_the_role(message: Message, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        await ids("qwen3", [message])


async def test_a_sampled_call_that_comes_back_in_another_shape_is_the_same_message() -> None:
    template = load("qwen3")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "b",  "c": 1}}\n</tool_call>'
    said = [*template.encode(call), template.eos_id]
    backend = FakeBackend(lambda ids, params: answer(said))
    settings = SessionSettings(SamplingParams(max_new_tokens=200), 1_000_000, locked=True, model="m")
    for other in ("object", "spaces", "parts", "null"):
        session = ChatSession(backend, template, settings)
        reply = await session.create(messages=[USER], tools=TOOLS)
        message = reply.choices[0].message.model_dump(exclude_none=True)
        (made,) = message["tool_calls"]
        arguments = json.loads(made["function"]["arguments"])
        if other in ("object", "spaces"):
            made["function"]["arguments"] = arguments if other == "object" else json.dumps(arguments, indent=3)
        else:
            message["content"] = [{"type": "text", "text": ""}] if other == "parts" else None
        await session.create(messages=[USER, message, {**RESULT, "tool_call_id": made["id"]}], tools=TOOLS)
        before, after = backend.requests[-2][0], backend.requests[-1][0]
        assert after[: len(before) + len(said)] == before + said, other
