"""Reasoning is kept apart from the answer: in an open thought everything is reasoning until it closes."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentrl.cli.chat_loop import calls_in_thought
from agentrl.core.episode import Message
from agentrl.inference.messages import essence
from agentrl.inference.session import ChatSession
from agentrl.inference.template import ChatTemplate
from agentrl.inference.thoughts import opens_thought
from agentrl.inference.tool_parsers import PARSERS, ToolParser
from agentrl.inference.tool_parsers.choice import parser_for
from tests.inference import (
    test_tool_parsers,
    test_tool_parsers_gemma_to_muse,
    test_tool_parsers_kimi_to_hunyuan,
    test_tool_parsers_m3_to_cohere,
)
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_session import HELLO, TOOL, calling, ids_of, make_session
from tests.inference.test_template_zoo import FILES, load
from tests.inference.test_tool_parsers import HERMES, TOOLS, check

THINKING = {name: parser for name, parser in PARSERS.items() if parser.thinking is not None}
CALLS = {
    name: text
    for module in (
        test_tool_parsers_kimi_to_hunyuan,
        test_tool_parsers,
        test_tool_parsers_gemma_to_muse,
        test_tool_parsers_m3_to_cohere,
    )
    for name, text, content, reasoning, calls in module.WELL_FORMED
    if calls and not (content or reasoning)
}
CALLS |= {
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Berlin"}',
    "ernie": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "hunyuan_v3": "<tool_call>now<tool_sep>\n</tool_call>",
    "hunyuan_v3_opensource": "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>",
}


def tags(parser: ToolParser) -> tuple[str, str]:
    assert parser.thinking is not None
    return parser.thinking


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_that_was_cut_is_no_answer_and_makes_no_call(name: str) -> None:
    parser = THINKING[name]
    opening, _ = tags(parser)
    draft = f"I could write\n{CALLS[name]}\nbut"
    for text, in_thought in ((draft, True), (f"{opening}\n{draft}", False), (f"{opening}{draft}", True)):
        parsed = parser.parse(text, TOOLS, in_thought=in_thought)
        assert (parsed.content, parsed.reasoning, parsed.calls) == ("", draft, ())
        plain = parser.without_calls(text, in_thought=in_thought)
        assert plain is not None and (plain.content, plain.reasoning) == ("", draft)


@pytest.mark.parametrize("name", THINKING)
def test_after_the_thought_the_answer_and_its_calls_are_read(name: str) -> None:
    parser = THINKING[name]
    opening, closing = tags(parser)
    draft, call = f"hm {CALLS[name]} hm", CALLS[name]
    expected = parser.parse(call, TOOLS).calls
    for text, in_thought in ((f"{draft}{closing}\n{call}", True), (f"{opening}{draft}{closing}\n{call}", False)):
        parsed = parser.parse(text, TOOLS, in_thought=in_thought)
        assert (parsed.content, parsed.reasoning, parsed.calls) == ("", draft, expected)
        plain = parser.without_calls(text, in_thought=in_thought)
        assert plain is not None and (plain.content, plain.reasoning) == (call.strip(), draft)
    parsed = parser.parse(f"{closing}{call}", TOOLS, in_thought=True)
    assert (parsed.content, parsed.reasoning, parsed.calls) == ("", None, expected)


@pytest.mark.parametrize("name", THINKING)
def test_a_second_thought_makes_no_call_either(name: str) -> None:
    parser = THINKING[name]
    opening, closing = tags(parser)
    call = CALLS[name]
    for end in (closing, ""):
        text = f"a{closing}Look.\n{opening}b {call} c{end}"
        parsed = parser.parse(text, TOOLS, in_thought=True)
        assert (parsed.content, parsed.reasoning, parsed.calls) == ("Look.", f"a\nb {call} c", ())


def test_tags_in_an_argument_are_part_of_it() -> None:
    for value in ("<think>x</think>", "<think>", "</think>", "</think><think>"):
        text = HERMES.replace("Berlin", value)
        for before in ("", "Look. ", "<think>r</think>"):
            (call,) = PARSERS["hermes"].parse(before + text, TOOLS).calls
            assert call.error is None and value in call.arguments


def test_without_a_thought_a_conversation_without_tools_keeps_its_text() -> None:
    for parser in THINKING.values():
        opening, closing = tags(parser)
        for text in ("7", "", f"7 {opening}x{closing}", f"7{closing}"):
            assert parser.without_calls(text) is None


def test_harmony_is_read_by_channel_without_tools_too() -> None:
    parser = PARSERS["harmony"]
    thought = "<|channel|>analysis<|message|>3 + 4"
    final = "<|end|><|start|>assistant<|channel|>final<|message|>7"
    call = "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    read = {text: parser.without_calls(text) for text in (thought, thought + final, thought + call)}
    assert [(one.content, one.reasoning, one.calls) for one in read.values() if one] == [
        ("", "3 + 4", ()),
        ("7", "3 + 4", ()),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "3 + 4", ()),
    ]
    assert parser.without_calls("just text") is None


@pytest.mark.parametrize(("tail", "found"), [
    ("<|im_start|>assistant\n<think>\n", True),
    ("<|im_start|>assistant\n<think>", True),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("<|im_start|>assistant\n<think></think>", False),
    ("<think>\nx<|im_end|>\n<|im_start|>assistant\n", False),
    ("say <think>\n<|im_end|><|im_start|>assistant\n", False),
    ("", False),
])  # fmt: skip
def test_only_an_opening_tag_at_the_end_opens_a_thought(tail: str, found: bool) -> None:
    assert opens_thought(tail, ("<think>", "</think>")) is found
    assert not opens_thought(tail, None)


OPEN = {"deepseek_r1_distill", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super",
        "nemotron_3_ultra", "nemotron_3_5_lightning", "deepseekv3", "deepseek_v3_2", "deepseek_v4", "deepseek_v4_1",
        "command_a", "ernie_4_5", "glm_4_7", "kimi_k3", "minimax_m2"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name in FILES if not name.endswith("_training")))
def test_a_cut_thought_is_never_the_answer_under_any_template_that_opens_one(name: str) -> None:
    template = load(name)
    parser = parser_for(template.source)
    tail = template.text(template.first([HELLO])[-32:], special=True)
    assert opens_thought(tail, parser.thinking) == (name in OPEN)


THOUGHTFUL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if open %}<think>\n{% endif %}"
    "{% endif %}"
)
DRAFT = 'I could call <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> or say 7'


def thoughtful(tiny_model: Path, *, open: bool, special: bool = False, policy: Any = None) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.chat_template = THOUGHTFUL
    return ChatTemplate(tokenizer, variables={"open": open}, policy=policy)


async def said(session: ChatSession, **options: Any) -> Any:
    return (await session.create(messages=[HELLO], **options)).choices[0]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}])
@pytest.mark.parametrize("open", [False, True])
async def test_a_session_tells_a_cut_thought_from_an_answer(
    tiny_model: Path, open: bool, options: dict[str, Any], special: bool
) -> None:
    template = thoughtful(tiny_model, open=open, special=special)
    text = DRAFT if open else f"<think>\n{DRAFT}"
    session = make_session(template, lambda ids, params: answer(ids_of(template, text), finish="length"), context=2000)
    choice = await said(session, **options)
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert (choice.message.content, choice.message.reasoning_content) == ("", DRAFT)
    stored = session.trajectory.nodes[-1].message
    assert (stored["content"], stored["reasoning_content"]) == ("", DRAFT) and "tool_calls" not in stored


@pytest.mark.parametrize("open", [False, True])
async def test_a_call_in_a_thought_that_never_closes_is_not_made_even_where_the_model_ended_its_turn(
    tiny_model: Path, open: bool
) -> None:
    """As docs/prompts.md says; vLLM and SGLang make it for some formats."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    template = thoughtful(tiny_model, open=open)
    session = make_session(template, calling(template, f"{'' if open else '<think>'}So I add.\n{call}"), context=2000)
    choice = await said(session, tools=[TOOL])
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.message.content == ""
    assert choice.message.reasoning_content == f"So I add.\n{call}"
    message = session.trajectory.nodes[-1].message
    assert calls_in_thought(message, "hermes", [TOOL]) == 1, "`agentrl chat --tokens` says so"
    assert calls_in_thought({**message, "content": "7"}, "hermes", [TOOL]) == 0
    assert calls_in_thought({**message, "reasoning_content": "So."}, "hermes", [TOOL]) == 0


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("open", [False, True])
async def test_without_tools_the_answer_is_what_follows_the_thought(
    tiny_model: Path, open: bool, special: bool
) -> None:
    template = thoughtful(tiny_model, open=open, special=special)
    start = "" if open else "<think>\n"
    texts = [f"{start}3 + 4\n</think>\n\n7<|im_start|> <tool_call>{{}}</tool_call>", f"{start}</think>7", "a STOP b"]
    session = make_session(template, calling(template, *texts), context=2000)
    choice = await said(session)
    assert (choice.message.content, choice.message.reasoning_content) == ("7 <tool_call>{}</tool_call>", "3 + 4")
    choice = await said(session)
    assert choice.message.content == "7" and not hasattr(choice.message, "reasoning_content")
    choice = await said(session, stop=["STOP"])
    if open:
        assert (choice.message.content, choice.message.reasoning_content) == ("", "a")
    else:
        assert choice.message.content == "a " and not hasattr(choice.message, "reasoning_content")


async def test_a_template_that_does_not_know_the_tags_leaves_them_in_the_answer(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model)
    text = "<think>3 + 4</think>\n7 "
    choice = await said(make_session(template, calling(template, text)))
    assert choice.message.content == text and not hasattr(choice.message, "reasoning_content")


async def test_gpt_oss_without_tools_answers_with_its_final_channel(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    template = ChatTemplate(tokenizer)
    text = "<|channel|>analysis<|message|>3 + 4<|end|><|start|>assistant<|channel|>final<|message|>7"
    choice = await said(make_session(template, calling(template, text)))
    assert (choice.message.content, choice.message.reasoning_content) == ("7", "3 + 4")


@pytest.mark.parametrize("policy", ["append", "branch"])
@pytest.mark.parametrize("back", ["object", "dict", "without reasoning", "with an empty reasoning"])
@pytest.mark.parametrize("text", ["3 + 4\n</think>\n\n7", "3 + 4", "</think>\n\n7"])
async def test_what_comes_back_is_found_with_or_without_its_reasoning(
    tiny_model: Path, text: str, back: str, policy: Any
) -> None:
    template = thoughtful(tiny_model, open=True, policy=policy)
    session = make_session(template, calling(template, text, "</think>\n\n8"), context=2000)
    message: Any = (await said(session)).message
    if back != "object":
        message = message.model_dump(exclude_none=True)
    if back == "without reasoning":
        message.pop("reasoning_content", None)
    elif back == "with an empty reasoning":
        message["reasoning_content"] = ""
    reply = await session.create(messages=[HELLO, message, {"role": "user", "content": "and?"}])
    assert reply.choices[0].message.content == "8"
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    (before, _), (after, _) = backend.requests
    assert after[: len(before) + len(ids_of(template, text)) + 1] == [*before, *ids_of(template, text), template.eos_id]


@pytest.mark.parametrize("text", ["3 + 4\n</think>\n\n7", "\n</think>\n\n7", "3 + 4"])
async def test_a_thought_is_no_drift_also_where_it_was_cut(tiny_model: Path, text: str) -> None:
    template = thoughtful(tiny_model, open=True, special=True)
    finish = "stop" if "think" in text else "length"
    ids = [*ids_of(template, text), *([template.eos_id] if finish == "stop" else [])]
    session = make_session(template, lambda *_: answer(ids, finish=finish), context=2000)
    await said(session)
    drift = session.drift()
    assert drift is not None and not drift.special
    assert drift.text == 0 or finish == "length"


def test_fields_that_a_model_does_not_see_do_not_change_a_message() -> None:
    bare: Message = {"role": "assistant", "content": "7"}
    assert essence({**bare, "reasoning_content": "3 + 4"}) == essence({**bare, "other": 1}) == essence(bare)


def ids_and_calls(parser: ToolParser, text: str, in_thought: bool) -> None:
    parsed = parser.parse(text, TOOLS, in_thought=in_thought)
    words = "".join((parsed.content + (parsed.reasoning or "")).split())
    assert len(words) <= len("".join(text.split()))
    opening, closing = tags(parser)
    if in_thought and closing not in text:
        reasoning = text.strip().removeprefix(opening) if text.lstrip().startswith(opening) else text
        assert (parsed.content, parsed.reasoning or "", parsed.calls) == ("", reasoning.strip(), ())
    if in_thought and closing in text:
        thought, _, rest = text.partition(closing)
        assert parsed.calls == parser.parse(f"{opening}{closing}{rest}", TOOLS).calls
        assert (parsed.reasoning or "").startswith(thought.strip().removeprefix(opening).strip())


@pytest.mark.parametrize("name", THINKING)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), in_thought=st.booleans())
def test_random_answers_keep_their_thoughts(name: str, seed: int, in_thought: bool) -> None:
    parser = THINKING[name]
    rng = random.Random(seed)
    pieces = [
        *tags(parser),
        *tags(parser),
        CALLS[name],
        CALLS[name][: rng.randrange(len(CALLS[name]))],
        "so",
        "\n",
        "é",
    ]
    text = "".join(rng.choice(pieces) for _ in range(rng.randrange(9)))
    check(name, text)
    ids_and_calls(parser, text, in_thought)


@pytest.mark.parametrize("name", THINKING)
def test_many_thoughts_take_linear_time(name: str) -> None:
    parser = THINKING[name]
    opening, closing = tags(parser)
    whole, cut = CALLS[name], CALLS[name][: len(CALLS[name]) // 2]
    for piece in (
        opening,
        closing,
        opening + closing,
        opening + cut + closing,
        cut + opening,
        whole + opening + closing,
    ):
        text = piece * (300_000 // len(piece))
        for in_thought in (False, True):
            started = time.process_time()
            parser.parse(text, TOOLS, in_thought=in_thought)
            parser.without_calls(text, in_thought=in_thought)
            assert time.process_time() - started < 5, (piece, in_thought)


@pytest.mark.parametrize("chosen", [0, 1])
async def test_of_samples_with_one_answer_the_one_with_the_same_reasoning_goes_on(
    tiny_model: Path, chosen: int
) -> None:
    template = thoughtful(tiny_model, open=True, policy="append")
    texts = ["3 + 4\n</think>\n\n7", "8 - 1\n</think>\n\n7", "</think>\n\n8"]
    session = make_session(template, calling(template, *texts), context=2000)
    reply = await session.create(messages=[HELLO], n=2)
    message = reply.choices[chosen].message.model_dump(exclude_none=True)
    await session.create(messages=[HELLO, message, {"role": "user", "content": "and?"}])
    assert session.trajectory.nodes[-2].parent == 1 + chosen
