# ruff: noqa: E501 - an example stands in one line
"""Parsers of Gemma 4, Granite, Phi-4-mini, MiniMax and Muse Glimmer: calls that their templates render come back.

The templates of Gemma 4 and Muse Glimmer are TRL's; the others are written here from the documented form.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.core.episode import Message
from agentrl.inference.tool_parsers import PARSERS, ParsedAnswer, parser_for
from tests.inference.test_template_zoo import FOLDER
from tests.inference.test_tool_parsers import MARKERS, TOOLS, Calls, check
from tests.inference.test_tool_parsers import tools_for as bare_tools_for

OURS = Path(__file__).parent / "family_templates"
PARSER_OF = {
    "granite_3": "granite", "granite_4": "hermes", "phi_4_mini": "phi4_mini", "phi_4_mini_functools": "phi4_mini",
    "minimax_m1": "minimax_m1", "minimax_m2": "minimax_m2",
}  # fmt: skip
FILES = {name: OURS / f"{name}.jinja" for name in PARSER_OF}
for file in FOLDER.glob("*.jinja"):
    if re.match(r"gemma4|diffusion_gemma|muse_glimmer", file.stem):
        FILES[file.stem] = file
        PARSER_OF[file.stem] = "muse" if file.stem.startswith("muse") else "gemma"
SOURCES = {name: file.read_text() for name, file in FILES.items()}
NEW = sorted(set(PARSER_OF.values()) - {"hermes"})
ENDS = re.compile(r"(?:<\|end_of_text\|>|<\|end\|>|<\|eot\|>|<end_of_sentence>|\[e~\[|<turn\|>)\s*\Z")
USER: Message = {"role": "user", "content": "Which one?"}


def rendered(name: str, message: Message, tools: list[dict[str, Any]]) -> str:
    """What a model would have sampled for an assistant message, without the end of its turn."""
    texts = []
    for messages, generation in (([USER], True), ([USER, message], False)):
        given: Any = tools
        found = render_jinja_template(
            conversations=[messages], tools=given, chat_template=SOURCES[name], add_generation_prompt=generation
        )
        texts.append(found[0][0])
    prompt, whole = texts
    if not whole.startswith(prompt):
        prompt = prompt.removesuffix("<think>\n")
    assert whole.startswith(prompt)
    return ENDS.sub("", whole[len(prompt) :])


def tools_for(calls: Calls) -> list[dict[str, Any]]:
    tools = bare_tools_for(calls)
    for tool in tools:
        tool["function"]["description"] = "Looks it up."
    return tools


def said(calls: Calls, **more: Any) -> Message:
    made = [
        {"id": f"call0000{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **more}


def found_in(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments) if call.error is None else call.error) for call in answer.calls]


@pytest.mark.parametrize("name", FILES)
def test_the_parser_of_a_family_is_chosen_from_its_template(name: str) -> None:
    assert parser_for(SOURCES[name]) is PARSERS[PARSER_OF[name]]


TEXT = 'Zürich "Enge", it\'s 日本 🙂\n second \\ line </p> {x: [1, 2]} '
ARGUMENTS: dict[str, Any] = {
    "text": TEXT, "digits": "007", "word": "true", "empty": "", "count": -3, "share": 0.5, "small": 1e-7, "big": 1e22,
    "on": True, "off": False, "none": None, "list": [1, "a", None, True, [TEXT], []],
    "inner": {"a": {"b": ["x", 2.5, "ü"], "c": {}}, "d": False},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_argument_comes_back(name: str) -> None:
    calls: Calls = [("look_up", ARGUMENTS), ("now", {}), ("look_up", {**ARGUMENTS, "text": "other"})]
    tools = tools_for(calls)
    parser = parser_for(SOURCES[name])
    for count in (1, 2, 3):
        for more in ({}, {"reasoning_content": "First the city."}):
            text = rendered(name, said(calls[:count], **more), tools)
            answer = parser.parse(text, tools)
            assert found_in(answer) == calls[:count], text
            assert answer.content == "", text
            assert answer.reasoning == ("First the city." if "First the city." in text else None), text


keys = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
letters = st.text().filter(lambda text: not any(mark in text for mark in ('<|"|>', "<|", "</")))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | letters
values = st.recursive(scalars, lambda part: st.lists(part, max_size=3) | st.dictionaries(keys, part, max_size=3))
calls_of = st.dictionaries(keys, st.dictionaries(keys, values, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("name", FILES)
def test_any_calls_come_back(name: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(made=calls_of)
    def comes_back(made: dict[str, dict[str, Any]]) -> None:
        calls = list(made.items())
        text = rendered(name, said(calls), tools_for(calls))
        answer = parser_for(SOURCES[name]).parse(text, tools_for(calls))
        assert found_in(answer) == calls and answer.content == "", text

    comes_back()


GEMMA = '<|tool_call>call:get_weather{city:<|"|>Berlin<|"|>,days:3}<tool_call|>'
LISTED = '[{"name": "get_weather", "arguments": {"city": "Berlin", "days": 3}}]'
LINE = LISTED[1:-1]
M2 = '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Berlin</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
ATEM = (
    M2.replace("minimax:tool_call", "atem:function_calls")
    .replace("invoke", "atem:invoke")
    .replace("parameter", "atem:parameter")
)
MUSE = f" to=get_weather<|message|>{ATEM}<|eot|>"
BERLIN = ("get_weather", {"city": "Berlin", "days": 3})

# fmt: off
WELL_FORMED: list[tuple[str, str, str, str | None, Calls]] = [
    ("gemma", f"<|channel>thought\nhm\n<channel|>I look.{GEMMA}{GEMMA}<|tool_response>", "I look.", "hm", [BERLIN, BERLIN]),
    ("gemma", '<|tool_call>call:f{a:<|"|><tool_call|>}<|"|>,b:{<|"|>c:d<|"|>:[None,True,-1.5e3]}}<tool_call|>', "", None, [("f", {"a": "<tool_call|>}", "b": {"c:d": [None, True, -1500.0]}})]),
    ("gemma", "<|tool_call>call:now{}<tool_call|>", "", None, [("now", {})]),
    ("gemma", '<|tool_call> call: f { "a b" : [ ] , c : { } } <tool_call|>', "", None, [("f", {'"a b"': [], "c": {}})]),
    ("gemma", "It is {a: 3}.", "It is {a: 3}.", None, []),
    ("granite", f"I look.<|tool_call|>{LISTED}", "I look.", None, [BERLIN]),
    ("granite", f"<tool_call> {LISTED}\nDone.", "Done.", None, [BERLIN]),
    ("granite", f"<think>hm</think><response>I look.</response><|tool_call|>{LISTED}", "I look.", "hm", [BERLIN]),
    ("granite", "<think>hm</think>\n<response>It is 3.</response>", "It is 3.", "hm", []),
    ("granite", f"<|tool_call|>{LINE}", "", None, [BERLIN]),
    ("phi4_mini", f"<|tool_call|>{LISTED}<|/tool_call|>", "", None, [BERLIN]),
    ("phi4_mini", f"<|tool_call|>{LINE}<|/tool_call|><|tool_call|>{LINE}<|/tool_call|>", "", None, [BERLIN, BERLIN]),
    ("phi4_mini", f"I look. functools{LISTED}", "I look.", None, [BERLIN]),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"a": "<|/tool_call|> functools[1]"}}]', "", None, [("f", {"a": "<|/tool_call|> functools[1]"})]),
    ("phi4_mini", "Python's functools is a module.", "Python's functools is a module.", None, []),
    ("minimax_m1", f"<think>hm</think>\n<tool_calls>\n{LINE}\n{LINE}\n</tool_calls>", "", "hm", [BERLIN, BERLIN]),
    ("minimax_m1", f"<tool_calls>\n{LISTED}", "", None, [BERLIN]),
    ("minimax_m2", f"hm</think>\n\nI look.\n{M2}", "I look.", "hm", [BERLIN]),
    ("minimax_m2", M2.replace("Berlin", ' "</invoke>"\n'), "", None, [("get_weather", {"city": ' "</invoke>"\n', "days": 3})]),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"></invoke><invoke name="f"><parameter name="a">[1]</parameter></invoke></minimax:tool_call>', "", None, [("now", {}), ("f", {"a": [1]})]),
    ("muse", f" to=self<|message|>hm<|eom|><|start|>assistant{MUSE}", "", "hm", [BERLIN]),
    ("muse", f" to=self<|message|>Maybe {ATEM}?<|eom|><|start|>assistant to=user<|message|>I write {ATEM}.<|eot|>", f"I write {ATEM}.", f"Maybe {ATEM}?", []),
    ("muse", " to=user<|message|>It is 3.", "It is 3.", None, []),
    ("muse", f" to=self<|message|>hm<|start|>assistant to=user<|message|>I look.<|eom|><|start|>assistant{MUSE}", "I look.", "hm", [BERLIN]),
    ("muse", "just text, to=x", "just text, to=x", None, []),
]

MALFORMED: list[tuple[str, str, str, str]] = [
    ("gemma", GEMMA.replace("Berlin<|\"|>", "Berlin"), "get_weather", "a text is not closed"),
    ("gemma", GEMMA.replace('<|"|>', ""), "get_weather", "got 'Berlin'"),
    ("gemma", GEMMA.replace('<|"|>', '"'), "get_weather", "before and after a text"),
    ("gemma", GEMMA.replace(",days", " days"), "get_weather", "want , or }"),
    ("gemma", GEMMA.replace("days:3", "3"), "get_weather", "has no name"),
    ("gemma", GEMMA.replace("}<tool_call|>", ""), "get_weather", "want , or }"),
    ("gemma", GEMMA.removesuffix("<tool_call|>"), "get_weather", "not closed"),
    ("gemma", GEMMA.replace("call:get_weather", "get_weather"), "", "has no name"),
    ("gemma", GEMMA.replace("days", "city"), "get_weather", "'city' is given twice"),
    ("gemma", "<|tool_call>call:f{a:" + "[" * 200 + "]" * 200 + "}<tool_call|>", "f", "levels"),
    ("gemma", "<|tool_call>call:f{a:1e999}<tool_call|>", "f", "Out of range float"),
    ("granite", "<|tool_call|>", "", "not JSON"),
    ("granite", "<|tool_call|>[]", "", "is empty"),
    ("granite", "<|tool_call|>now()", "", "not JSON"),
    ("granite", f"<|tool_call|>{LISTED}]", "get_weather", "Extra data"),
    ("granite", f"<|tool_call|>{LISTED[:-4]}", "get_weather", "not valid JSON"),
    ("phi4_mini", "<|tool_call|>[5]<|/tool_call|>", "", "got integer"),
    ("phi4_mini", 'functools[{"name": "f"}]', "f", "has no arguments"),
    ("phi4_mini", f"<|tool_call|>{LISTED[:-4]}<|/tool_call|>", "get_weather", "not valid JSON"),
    ("minimax_m1", "<tool_calls>\n</tool_calls>", "", "not JSON"),
    ("minimax_m1", "<tool_calls>\n" + LINE.replace("3", "x") + "\n</tool_calls>", "get_weather", "Expecting value"),
    ("minimax_m2", M2.replace(">3<", ">three<"), "get_weather", "'days': want integer"),
    ("minimax_m2", M2.replace("</parameter>\n<parameter", "<parameter"), "get_weather", "'city' is not closed"),
    ("minimax_m2", M2.partition("</invoke>")[0], "get_weather", "not closed"),
    ("minimax_m2", "<minimax:tool_call>now()", "", "has no name"),
    ("minimax_m2", M2.replace("days", "city").replace("3", "x"), "get_weather", "'city' is given twice"),
    ("muse", MUSE.replace(">3<", ">three<"), "get_weather", "'days': want integer"),
    ("muse", " to=get_weather<|message|>now()<|eot|>", "get_weather", "holds no tool call"),
    ("muse", " to=get_weather", "get_weather", "holds no tool call"),
]
# fmt: on


@pytest.mark.parametrize(("parser", "text", "content", "reasoning", "calls"), WELL_FORMED)
def test_examples_of_each_format(parser: str, text: str, content: str, reasoning: str | None, calls: Calls) -> None:
    answer = PARSERS[parser].parse(text, TOOLS)
    assert found_in(answer) == calls
    assert (answer.content, answer.reasoning) == (content, reasoning)


@pytest.mark.parametrize(("parser", "text", "name", "error"), MALFORMED)
def test_a_malformed_call_says_what_is_wrong_and_keeps_the_words(parser: str, text: str, name: str, error: str) -> None:
    (call,) = PARSERS[parser].parse(text, TOOLS).calls
    assert call.name == name and call.arguments in text
    assert call.error is not None and error in call.error and "\n" not in call.error and len(call.error) < 300


@pytest.mark.parametrize(("parser", "bad", "good"), [
    ("gemma", "<|tool_call>call:f{a:", GEMMA),
    ("gemma", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', GEMMA.replace('<|"|>Berlin<|"|>', "null")),
    ("granite", '<|tool_call|>[{"name": "f", "arg', f"<|tool_call|>{LISTED}"),
    ("phi4_mini", '<|tool_call|>[{"name": "f", "arg<|/tool_call|>', f"functools{LISTED}"),
    ("minimax_m1", '<tool_calls>\n{"name": "f", "arg\n', f"{LINE}\n</tool_calls>"),
    ("minimax_m1", '<tool_calls>\nf()', f"\n{LINE}\n</tool_calls>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</invoke>', M2.removeprefix("<minimax:tool_call>")),
    ("muse", ' to=f<|message|><atem:invoke name="f"><eom><|start|>assistant', MUSE),
])  # fmt: skip
def test_a_malformed_call_does_not_take_the_next_one_with_it(parser: str, bad: str, good: str) -> None:
    first, second = PARSERS[parser].parse(bad + good, TOOLS).calls
    assert first.error is not None and second.error is None and second.name == "get_weather"


WHOLE = {"gemma": GEMMA, "granite": f"<|tool_call|>{LISTED}", "phi4_mini": f"functools{LISTED}", "minimax_m2": M2,
         "minimax_m1": f"<tool_calls>\n{LINE}\n</tool_calls>", "muse": MUSE}  # fmt: skip


@pytest.mark.parametrize("parser", NEW)
def test_a_damaged_call_is_never_lost_and_never_another(parser: str) -> None:
    text = WHOLE[parser]
    for at in range(text.index("get_weather") - 1, len(text)):
        for damage in ("", *MARKERS, "<|eot|>"):
            for taken in (0, 1, 3):
                damaged = text[:at] + damage + text[at + taken :]
                assert check(parser, damaged).calls or "think>" in damaged


HOSTILE = {
    "gemma": [
        '<|tool_call>call:f{a:<|"|>',
        "<|tool_call>call:f{",
        "{a:",
        "[",
        "<|tool_call>call:",
        '<|"|>',
        "a:1,",
        "<",
    ],
    "granite": ["<|tool_call|>[", '<|tool_call|>{"name":', "<tool_call>", "[{},", "</response>", "<|tool_call|>[1] x"],
    "phi4_mini": ["<|tool_call|>[", "functools[", "functools", "<|/tool_call|>", '\n{"name":'],
    "minimax_m1": ["<tool_calls>{", '\n{"name": x', "<tool_calls>", '<tool_calls>x\n{"name"', "</tool_calls>"],
    "minimax_m2": [
        "<invoke ",
        '<invoke name="f">',
        '<invoke name="f"><parameter name="a">',
        "<minimax:tool_call>",
        "</invoke>",
    ],
    "muse": [" to=", "to=f<|message|>", "<|start|>assistant to=", "<|start|>", "<|message|>", '<atem:invoke name="f">'],
}


@pytest.mark.parametrize("parser", NEW)
def test_long_hostile_texts_take_linear_time(parser: str) -> None:
    start = {"gemma": "<|tool_call>call:f{a:", "muse": " to=f<|message|>", "minimax_m1": "<tool_calls>"}.get(parser, "")
    for piece in [*HOSTILE[parser], "\n", " ", "\n{", ";", "\\", '"']:
        for before in ("", start):
            started = time.process_time()
            check(parser, before + piece * (200_000 // len(piece)))
            assert time.process_time() - started < 5, (piece, before)
