"""Sessions: token-in, token-out, masks, branches, aborts, limits."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.core.agent import ContextOverflow
from agentrl.core.episode import NOT_SAMPLED, Message
from agentrl.core.message_shape import in_shape
from agentrl.inference.backend import Generation, InferenceError, SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from tests.flat import flat_branches
from tests.inference.fakes import FakeBackend, Script, answer
from tests.inference.test_template import REWRITING

HELLO: Message = {"role": "user", "content": "hello"}
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=20), 500, locked=True, model="m")


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def make_session(template: ChatTemplate, script: Script, *, context: int = 500, locked: bool = True) -> ChatSession:
    settings = replace(SETTINGS, context_length=context, locked=locked)
    return ChatSession(FakeBackend(script), template, settings)


def ids_of(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenizer.encode(text, add_special_tokens=False)


async def test_the_second_turn_sends_exactly_the_stored_ids_and_the_new_ones(template: ChatTemplate) -> None:
    odd = [*ids_of(template, "u"), *ids_of(template, "ser"), template.eos_id]  # "user" in a way no encoder splits it
    assert odd[:-1] != ids_of(template, "user")
    session = make_session(template, lambda ids, params: answer(odd, version=3))
    first = await session.create(messages=[HELLO])
    said = {"role": "assistant", "content": first.choices[0].message.content}
    assert said["content"] == "user"
    await session.create(messages=[HELLO, said, {"role": "user", "content": "more"}])
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    (sent_first, _), (sent_second, _) = backend.requests
    expected = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert sent_second == [*sent_first, *odd, *ids_of(template, expected)]


async def test_sampled_tokens_carry_mask_logprob_and_version_and_no_others_do(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5, 6, template.eos_id], version=7))
    await session.create(messages=[HELLO])
    (flat,) = flat_branches(session.trajectory)
    prompt = len(flat.token_ids) - 3
    assert flat.loss_mask == [0] * prompt + [1, 1, 1]
    assert flat.logprobs == [0.0] * prompt + [-1.0, -2.0, -3.0]
    assert flat.versions == [NOT_SAMPLED] * prompt + [7, 7, 7]


async def test_a_turn_cut_off_by_length_is_closed_with_a_token_that_is_not_trained(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer(ids_of(template, "abc"), finish="length"))
    first = await session.create(messages=[HELLO])
    assert first.choices[0].finish_reason == "length"
    said = {"role": "assistant", "content": "abc"}
    await session.create(messages=[HELLO, said, HELLO])
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    added = backend.requests[1][0][len(backend.requests[0][0]) + 3 :]
    assert added == ids_of(template, "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    node = session.trajectory.nodes[-2]
    assert node.token_ids == added and not any(node.loss_mask)


async def test_an_aborted_request_goes_on_with_its_ids_and_its_exact_budget(template: ChatTemplate) -> None:
    parts = iter([answer([1, 2], version=1, finish="abort"), answer([], finish="abort"), answer([3], version=2)])
    session = make_session(template, lambda ids, params: next(parts))
    await session.create(messages=[HELLO])
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    prompt = backend.requests[0][0]
    assert [ids for ids, _ in backend.requests] == [prompt, [*prompt, 1, 2], [*prompt, 1, 2]]
    assert [params.max_new_tokens for _, params in backend.requests] == [20, 18, 18]
    node = session.trajectory.nodes[-1]
    assert (node.token_ids, node.versions, node.finish_reason) == ([1, 2, 3], [1, 1, 2], "stop")


async def test_a_server_that_only_aborts_is_an_error(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([], finish="abort"))
    with pytest.raises(InferenceError, match="aborted one request"):
        await session.create(messages=[HELLO])


async def test_several_samples_of_a_turn_are_branches_that_share_its_prompt(template: ChatTemplate) -> None:
    replies = iter([answer([5, template.eos_id]), answer([6, 7, template.eos_id])])
    session = make_session(template, lambda ids, params: next(replies))
    response = await session.create(messages=[HELLO], n=2)
    assert len(response.choices) == 2
    assert len(session.trajectory.nodes) == 3
    flats = flat_branches(session.trajectory)
    assert [sum(f.loss_mask) for f in flats] == [2, 3]


async def test_a_sample_that_fails_gives_up_its_siblings(template: ChatTemplate) -> None:
    cancelled = asyncio.Event()

    class Half(FakeBackend):
        async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
            self.requests.append((token_ids, params))
            if len(self.requests) == 2:
                raise InferenceError("the second one fails")
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

    session = ChatSession(Half(lambda ids, params: answer([])), template, SETTINGS)
    with pytest.raises(InferenceError, match="the second one fails"):
        await session.create(messages=[HELLO], n=2)
    assert cancelled.is_set()


async def test_a_response_format_reaches_the_server_in_evaluation(template: ChatTemplate) -> None:
    session = ChatSession(
        FakeBackend(lambda ids, params: answer([template.eos_id])),
        template,
        replace(SETTINGS, locked=False, structured_output=True),
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await session.create(
        messages=[HELLO], response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    assert json.loads(backend.requests[0][1].json_schema or "") == schema


async def test_a_response_format_is_refused_where_the_server_cannot_hold_to_it(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([template.eos_id]), locked=False)
    with pytest.raises(ValueError, match=r"response_format.*cannot constrain an answer to a schema"):
        await session.create(messages=[HELLO], response_format={"type": "json_object"})


async def test_conversations_that_begin_alike_are_each_continued_by_their_ids(template: ChatTemplate) -> None:
    """The second one under the same system message was rendered anew at each turn: its answers were encoded again."""
    odd = [*ids_of(template, "u"), *ids_of(template, "ser"), template.eos_id]  # "user" in a way no encoder splits it
    session = make_session(template, lambda ids, params: answer(odd))
    talks: dict[str, list[Message]] = {
        name: [{"role": "system", "content": "Be brief."}, {"role": "user", "content": name}] for name in "abc"
    }
    sent: dict[str, list[int]] = {}
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    for turn in range(3):
        for name, messages in talks.items():
            reply = await session.create(messages=messages)
            prompt = backend.requests[-1][0]
            if turn:
                assert prompt[: len(sent[name]) + len(odd)] == [*sent[name], *odd]
            sent[name] = prompt
            said = {"role": "assistant", "content": reply.choices[0].message.content}
            messages += [said, {"role": "user", "content": "go on"}]
    assert [sum(flat.loss_mask) for flat in flat_branches(session.trajectory)] == [3 * len(odd)] * 3


async def test_a_conversation_that_rewrites_history_starts_over_instead_of_mixing(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5, template.eos_id]))
    await session.create(messages=[HELLO])
    other = [{"role": "user", "content": "another"}, {"role": "assistant", "content": "x"}, HELLO]
    await session.create(messages=other)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    assert backend.requests[1][0] == template.first(other)
    assert len(flat_branches(session.trajectory)) == 2


async def test_messages_in_another_shape_are_read_once_and_noticed_when_changed(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dumped messages hold fields that are null: all of them were read again at each turn."""
    reads = 0

    def counted(message: Any, **how: Any) -> Message:
        nonlocal reads
        reads += 1
        return in_shape(message, **how)

    monkeypatch.setattr("agentrl.inference.ledger.in_shape", counted)
    session = make_session(template, lambda ids, params: answer([5, template.eos_id]))
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": None}]
    for turn in range(8):
        reads = 0
        reply = await session.create(messages=messages)
        assert reads <= 3, "what was new in the call before, the answer, and what follows it"
        messages += [
            reply.choices[0].message.model_dump(),
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
        assert len(session.trajectory.nodes) == 2 * (turn + 1)
    messages[2]["content"][0]["text"] = "changed"
    await session.create(messages=messages)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    assert "changed" in template.text(backend.requests[-1][0])


async def test_a_sampled_token_shared_by_two_branches_is_trained_once(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5, template.eos_id]))
    first = await session.create(messages=[HELLO])
    said = {"role": "assistant", "content": first.choices[0].message.content}
    await session.create(messages=[HELLO, said, {"role": "user", "content": "a"}])
    await session.create(messages=[HELLO, said, {"role": "user", "content": "b"}])
    assert [sum(f.loss_mask) for f in flat_branches(session.trajectory)] == [4, 2]
    assert sum(sum(node.loss_mask) for node in session.trajectory.nodes) == 6


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5]), context=10)
    with pytest.raises(ContextOverflow, match=r"prompt of \d+ tokens does not fit inference.context_length=10"):
        await session.create(messages=[HELLO])


async def test_the_answer_gets_only_the_room_that_the_context_leaves(template: ChatTemplate) -> None:
    length = len(template.first([HELLO]))
    session = make_session(template, lambda ids, params: answer([5]), context=length + 4)
    await session.create(messages=[HELLO], max_completion_tokens=100)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    assert backend.requests[0][1].max_new_tokens == 4


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"top_p": 0.9}])
async def test_training_refuses_another_distribution(template: ChatTemplate, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="behavior logprobs wrong"):
        await make_session(template, lambda ids, params: answer([5])).create(messages=[HELLO], **options)
    free = make_session(template, lambda ids, params: answer([5]), locked=False)
    await free.create(messages=[HELLO], **options)


async def test_an_unknown_option_is_refused_by_name(template: ChatTemplate) -> None:
    with pytest.raises(TypeError, match="logit_bias"):
        await make_session(template, lambda ids, params: answer([5])).create(messages=[HELLO], logit_bias={})


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tool_template(tiny_model: Path) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = WITH_TOOLS
    return ChatTemplate(tokenizer)


def calling(template: ChatTemplate, *texts: str) -> Script:
    """A server whose answers are these texts, in turn."""
    replies = iter(texts)
    return lambda ids, params: answer([*ids_of(template, next(replies)), template.eos_id])


async def test_made_up_call_ids_are_the_same_in_each_run_and_never_twice(tool_template: ChatTemplate) -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' * 2
    reply = [*ids_of(tool_template, text), tool_template.eos_id]

    async def ids(seed: int) -> list[str]:
        settings = replace(SETTINGS, context_length=2000, sampling=SamplingParams(max_new_tokens=200, seed=seed))
        session = ChatSession(FakeBackend(lambda ids, params: answer(reply)), tool_template, settings)
        replies = [await session.create(messages=[HELLO], tools=[TOOL], n=2) for _ in range(2)]
        return [call.id for one in replies for choice in one.choices for call in choice.message.tool_calls]

    first, again, other = await ids(5), await ids(5), await ids(6)
    assert first == again and len(set(first)) == len(first) == 8
    assert not set(first) & set(other)
    assert all(len(one) == 9 and one.isalnum() for one in first)


async def test_tool_calls_are_found_and_their_results_continue_the_same_ids(tool_template: ChatTemplate) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    session = make_session(tool_template, calling(tool_template, f"I add.{call}{call}", "2"))
    messages: list[Any] = [HELLO]
    first = await session.create(messages=messages, tools=[TOOL])
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
    assert [c.function.arguments for c in choice.message.tool_calls] == ['{"a": 1}'] * 2
    ids = [c.id for c in choice.message.tool_calls]
    assert len(set(ids)) == 2
    messages += [choice.message, *({"role": "tool", "tool_call_id": i, "content": "two"} for i in ids)]
    second = await session.create(messages=messages, tools=[TOOL])
    assert second.choices[0].finish_reason == "stop" and second.choices[0].message.tool_calls is None
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    (before, _), (after, _) = backend.requests
    sampled = [*ids_of(tool_template, f"I add.{call}{call}"), tool_template.eos_id]
    results = "\n" + "<|im_start|>tool\ntwo<|im_end|>\n" * 2 + "<|im_start|>assistant\n"
    assert after == [*before, *sampled, *ids_of(tool_template, results)]


async def test_a_cut_answer_says_so_also_after_a_whole_call(tool_template: ChatTemplate) -> None:
    """Else an agent takes what was cut for the turn's end (vLLM 58228)."""
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "ad'
    session = make_session(tool_template, lambda ids, params: answer(ids_of(tool_template, text), finish="length"))
    reply = await session.create(messages=[HELLO], tools=[TOOL])
    assert reply.choices[0].finish_reason == "length" and reply.choices[0].message.tool_calls
    assert session.trajectory.nodes[-1].finish_reason == "length"


async def test_a_malformed_call_keeps_its_words_and_is_marked(tool_template: ChatTemplate) -> None:
    session = make_session(tool_template, calling(tool_template, '<tool_call>{"name": "add", "argum</tool_call>'))
    reply = await session.create(messages=[HELLO], tools=[TOOL])
    (call,) = reply.choices[0].message.tool_calls
    assert "argum" in call.function.arguments
    assert session.trajectory.nodes[-1].message["tool_calls"][0]["error"]


async def test_without_tools_or_with_tool_choice_none_nothing_is_parsed(tool_template: ChatTemplate) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    session = make_session(tool_template, calling(tool_template, call, call))
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        reply = await session.create(messages=[HELLO], **options)
        assert reply.choices[0].message.content == call and reply.choices[0].message.tool_calls is None


async def test_other_tools_are_another_conversation(tool_template: ChatTemplate) -> None:
    session = make_session(tool_template, calling(tool_template, "a", "b"))
    await session.create(messages=[HELLO])
    await session.create(messages=[HELLO], tools=[TOOL])
    assert [node.parent for node in session.trajectory.nodes if node.message["role"] == "user"] == [None, None]


async def test_a_rewriting_template_needs_a_policy(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = REWRITING
    said = "<think>x</think>yes"
    follow = [HELLO, {"role": "assistant", "content": said}, HELLO]
    requests: dict[str | None, list[list[int]]] = {}
    for policy in ("append", "branch", None):
        template = ChatTemplate(tokenizer, policy=policy)  # type: ignore[arg-type]
        session = make_session(template, calling(template, said, "b"))
        await session.create(messages=[HELLO])
        if policy is None:
            with pytest.raises(TemplateError, match=r"inference\.history"):
                await session.create(messages=follow)
            continue
        await session.create(messages=follow)
        backend: FakeBackend = session._backend  # type: ignore[assignment]
        requests[policy] = [ids for ids, _ in backend.requests]
        trained = [sum(flat.loss_mask) for flat in flat_branches(session.trajectory)]
        sampled = [len(ids_of(template, text)) + 1 for text in (said, "b")]
        assert trained == ([sum(sampled)] if policy == "append" else sampled), "each sampled token once"
    first, second = requests["append"]
    assert second[: len(first)] == first and "think" in tokenizer.decode(second)
    assert "think" not in tokenizer.decode(requests["branch"][1])


async def test_a_stop_string_is_cut_from_the_text_and_not_from_the_ids(template: ChatTemplate) -> None:
    ids = ids_of(template, "abc STOP")
    session = make_session(template, lambda _, params: answer(ids))
    reply = await session.create(messages=[HELLO], stop="STOP")
    assert reply.choices[0].message.content == "abc "
    assert session.trajectory.nodes[-1].token_ids == ids


async def test_a_stream_gives_the_same_answer(template: ChatTemplate) -> None:
    session = make_session(template, calling(template, "hello"))
    text, reasons = "", []
    stream = await session.create(messages=[HELLO], stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
        usage = chunk.usage
    assert (text, reasons[-1]) == ("hello", "stop")
    assert usage.completion_tokens == len(ids_of(template, "hello")) + 1


async def test_logprobs_come_back_with_the_tokens_they_belong_to(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer(ids_of(template, "ab")))
    reply = await session.create(messages=[HELLO], logprobs=True)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "ab"
    assert [entry.logprob for entry in content] == [-1.0 - i for i in range(len(content))]


async def test_logprobs_hold_the_bytes_of_each_token_also_of_parts_of_a_letter_and_of_the_end(
    template: ChatTemplate,
) -> None:
    """Parts of a letter came as U+FFFD (ollama 13497), and the token that ended the turn as nothing."""
    ids = [*ids_of(template, "ab 🙂"), template.eos_id]
    session = make_session(template, lambda _, params: answer(ids))
    reply = await session.create(messages=[HELLO], logprobs=True)
    content = reply.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == "ab 🙂<|im_end|>"
    assert content[-1].token == "<|im_end|>" and [entry.token for entry in content[:2]] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "evaluation only"),
        ({"response_format": {"type": "json_schema"}}, "must be"),
        ({"tools": [{"name": "f"}]}, "a tool must be"),
        ({"n": 0}, "n=0"),
        ({"max_tokens": 0}, "no room"),
        ({"functions": []}, "use tools"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason(
    template: ChatTemplate, options: dict[str, Any], text: str
) -> None:
    session = make_session(template, calling(template, "a"))
    with pytest.raises((TypeError, ValueError), match=text):
        await session.create(messages=[HELLO], **options)
    assert not session.trajectory.nodes
