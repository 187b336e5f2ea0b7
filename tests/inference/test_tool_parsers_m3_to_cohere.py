# ruff: noqa: E501 - an example stands in one line
"""Parsers of MiniMax-M3, Hunyuan 4 and Cohere: their documented texts, what is malformed, and public bug reports."""

import json
import time
from typing import Any

import pytest

from agentrl.inference.thoughts import knows_tags
from agentrl.inference.tool_parsers import PARSERS, parser_for
from tests.inference.parser_cases import Calls, assert_malformed, assert_parsed, read_calls
from tests.inference.sampled_turns import tools_for
from tests.inference.test_template_zoo import FAMILIES, FILES, load

TOOLS = tools_for([("search", {"query": "x", "top": 1, "when": {}, "ids": []}), ("now", {})])
ORDER: list[dict[str, Any]] = [{"type": "function", "function": {"name": "order", "parameters": {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "item": {"type": "object", "properties": {"item": {"type": "string"}}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "$defs": {"Item": {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}}},
}}}]  # fmt: skip
FOUND: Calls = [("search", {"query": "Kö", "top": 3})]
M3 = '<tool_call>\n<invoke name="search"><query>Kö</query><top>3</top></invoke>\n</tool_call>'
NOW = '<tool_call>\n<invoke name="now"></invoke>\n</tool_call>'
HY4 = "<tool_calls>\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>Kö</arg_value>\n<arg_key>top</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>"
ACTION = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "search", "parameters": {"query": "Kö", "top": 3}}\n]<|END_ACTION|>'


def m3(text: str) -> str:
    """The text with the mark before each tag."""
    return text.replace("<", "]<]minimax[>[<")


def hy4(text: str) -> str:
    """The text with the suffix of Hunyuan 4 in each tag."""
    return text.replace(">", ":6124c78e>")


WELL_FORMED: list[tuple[str, str, str, str | None, Calls]] = [
    ("minimax_m3", m3(M3), "", None, FOUND),
    (
        "minimax_m3",
        "<mm:think>hm</mm:think>I look."
        + m3(M3.replace("</tool_call>", ""))
        + m3('<invoke name="now"></invoke></tool_call>'),
        "I look.",
        "hm",
        [*FOUND, ("now", {})],
    ),
    (
        "minimax_m3",
        m3(
            '<invoke name="search"><when><day>May 5</day><hours><item>7</item><item>8</item></hours></when><ids><item>3</item></ids></invoke>'
        ),
        "",
        None,
        [("search", {"when": {"day": "May 5", "hours": [7, 8]}, "ids": [3]})],
    ),
    (
        "minimax_m3",
        m3('<invoke name="search">\n<ids>\n<item>3</item>\n</ids>\n<when></when>\n<query></query>\n</invoke>'),
        "",
        None,
        [("search", {"ids": [3], "when": {}, "query": ""})],
    ),
    (
        "minimax_m3",
        m3('<invoke name="search"><query>QUERY</query></invoke>').replace("QUERY", "if a < b: <item>x</item>\n  ]<] "),
        "",
        None,
        [("search", {"query": "if a < b: <item>x</item>\n  ]<] "})],
    ),
    ("minimax_m3", "No <tool_call> here.", "No <tool_call> here.", None, []),
    ("hunyuan_v4", hy4(HY4), "", None, FOUND),
    (
        "hunyuan_v4",
        hy4(
            "<think>hm</think>I look.<tool_calls><tool_call>search<arg_key>query</arg_key><arg_value>Kö</arg_value><arg_key>top</arg_key><arg_value>3</arg_value></tool_call><tool_call>now\n</tool_call></tool_calls>"
        ),
        "I look.",
        "hm",
        [*FOUND, ("now", {})],
    ),
    ("cohere", ACTION, "", None, FOUND),
    (
        "cohere",
        "I plan.<|END_THINKING|>"
        + ACTION.replace("}}", '}}, {"tool_call_id": "1", "tool_name": "now", "parameters": {}}'),
        "",
        "I plan.",
        [*FOUND, ("now", {})],
    ),
    ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>It is 4.<|END_RESPONSE|>", "It is 4.", "hm", []),
    ("cohere", "<|START_TEXT|>It is 4.", "It is 4.", None, []),
    ("cohere", f"<|START_TEXT|>I look.<|END_TEXT|>{ACTION}", "I look.", None, FOUND),
    ("cohere", ACTION.replace("Kö", "<|END_ACTION|>"), "", None, [("search", {"query": "<|END_ACTION|>", "top": 3})]),
    ("cohere", '<|START_ACTION|>{"tool_name": "now", "parameters": {}}', "", None, [("now", {})]),
]

MALFORMED: list[tuple[str, str, str, str]] = [
    ("minimax_m3", m3(M3.replace(">3<", ">three<")), "search", "'top': want integer"),
    ("minimax_m3", m3(M3.replace("</top>", "")), "search", "'top' is not closed"),
    ("minimax_m3", m3(M3.replace("</invoke>\n</tool_call>", "")), "search", "not closed"),
    ("minimax_m3", m3(M3.replace("<query>", "so <query>")), "search", "text beside elements"),
    ("minimax_m3", m3('<invoke name="search"><when>at <day>5</day></when></invoke>'), "search", "text beside elements"),
    ("minimax_m3", m3('<invoke name="search"><top>1</top><top>2</top></invoke>'), "search", "'top'"),
    (
        "minimax_m3",
        m3('<invoke name="search"><query><item>a</item></query></invoke>'),
        "search",
        "'query': want string, got elements",
    ),
    (
        "minimax_m3",
        m3('<invoke name="search"><ids><id>1</id></ids></invoke>'),
        "search",
        "'ids': want array, got elements",
    ),
    ("minimax_m3", m3("<tool_call>"), "", "has no name"),
    ("minimax_m3", m3('<invoke name="">') + m3("</invoke>"), "", "has no name"),
    ("minimax_m3", m3('<invoke name="f">' + "<a>" * 120 + "</a>" * 120 + "</invoke>"), "f", "nested more than"),
    ("hunyuan_v4", hy4(HY4.replace("</tool_call>", "")), "search", "not closed"),
    ("hunyuan_v4", hy4(HY4.replace(">3<", ">three<")), "search", "'top': want integer"),
    ("cohere", ACTION.replace('"top": 3', '"top": '), "search", "not valid JSON"),
    ("cohere", ACTION.replace('"tool_name": "search", ', ""), "", "has no name"),
    ("cohere", '<|START_ACTION|>[{"tool_name": "search"}]<|END_ACTION|>', "search", "has no arguments"),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>", "", "is empty"),
    ("cohere", "<|START_ACTION|>", "", "is empty"),
    ("cohere", '<|START_ACTION|>[{"tool_name": "search", "parameters": {"query": "a', "search", "not valid JSON"),
]


@pytest.mark.parametrize(("parser", "text", "content", "reasoning", "calls"), WELL_FORMED)
def test_documented_texts(parser: str, text: str, content: str, reasoning: str | None, calls: Calls) -> None:
    assert_parsed(parser, text, TOOLS, content, reasoning, calls)


@pytest.mark.parametrize(("parser", "text", "name", "error"), MALFORMED)
def test_a_malformed_call_says_what_is_wrong_and_keeps_the_words(parser: str, text: str, name: str, error: str) -> None:
    assert_malformed(parser, text, TOOLS, name, error)


@pytest.mark.parametrize(("parser", "bad", "good"), [
    ("minimax_m3", m3('<invoke name="f"><a>1'), m3(NOW)),
    ("minimax_m3", m3('<invoke name="f"><a>1</b></invoke>'), m3(NOW)),
    ("hunyuan_v4", hy4("<tool_call>f<arg_key>a</arg_key></tool_call>"), hy4(HY4)),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "par', ACTION),
])  # fmt: skip
def test_a_malformed_call_does_not_take_the_next_one_with_it(parser: str, bad: str, good: str) -> None:
    first, second = PARSERS[parser].parse(bad + good, TOOLS).calls
    assert first.error is not None and first.arguments in bad
    assert second.error is None


@pytest.mark.parametrize(("body", "arguments"), [
    ("<items><item><sku>007</sku><count>2</count></item><item><sku>true</sku></item></items>",
     {"items": [{"sku": "007", "count": 2}, {"sku": "true"}]}),
    ("<item><item>5</item></item>", {"item": {"item": "5"}}),  # an object, by its schema
    ("<tags></tags><note>null</note>", {"tags": [], "note": None}),
    ("<tags><item>1</item></tags><note>n</note>", {"tags": ["1"], "note": "n"}),
    ("<other><item>1</item></other><more><a>x</a></more>", {"other": [1], "more": {"a": "x"}}),
])  # fmt: skip
def test_minimax_m3_reads_nested_values_by_their_schemas(body: str, arguments: dict[str, Any]) -> None:
    answer = PARSERS["minimax_m3"].parse(m3(f'<invoke name="order">{body}</invoke>'), ORDER)
    assert read_calls(answer) == [("order", arguments)]


@pytest.mark.parametrize("piece", ['<invoke name="f">', '<invoke name="f"><a>', "<tool_call>", "<a>", "</invoke>"])
def test_many_tags_of_minimax_m3_take_linear_time(piece: str) -> None:
    text = m3(piece) * (300_000 // len(m3(piece)))
    started = time.process_time()
    PARSERS["minimax_m3"].parse(text, TOOLS)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(("family", "parser"), [
    ("minimax_m3", "minimax_m3"), ("command_a", "cohere"), ("hunyuan_v4", "hunyuan_v4"),
    ("hunyuan_v3", "hunyuan_v3"), ("hunyuan_v3_opensource", "hunyuan_v3_opensource"), ("minimax_m2", "minimax_m2"),
])  # fmt: skip
def test_the_parser_of_a_family_is_chosen_from_its_template(family: str, parser: str) -> None:
    source = FAMILIES[family].read_text()
    found = parser_for(source)
    assert (found.name, found.thinking) == (parser, PARSERS[parser].thinking)
    if family != "hunyuan_v3":  # its tags have no suffix here, and are made letter by letter
        assert knows_tags(source, found.thinking), "the reasoning of an answer without tools is found, too"
    assert not knows_tags(FILES["qwen2_5"].read_text(), found.thinking)


@pytest.mark.parametrize("suffix", ["", ":1a2b3c", ":opensource"])
@pytest.mark.parametrize("family", ["hunyuan_v3_opensource", "hunyuan_v4"])
def test_hunyuans_thinking_tags_have_the_suffix_of_the_template(family: str, suffix: str) -> None:
    """Weights of one version were published with several suffixes; the thought under another one was the answer."""
    source = FAMILIES[family].read_text().replace(":opensource", suffix).replace(":6124c78e", suffix)
    text = "<think>hm</think>I look." + HY4.replace("search\n", "search<tool_sep>\n")
    answer = parser_for(source).parse(text.replace(">", f"{suffix}>"), TOOLS)
    assert (answer.content, answer.reasoning, read_calls(answer)) == ("I look.", "hm", FOUND)


def test_cohere_numbers_its_calls_itself() -> None:
    template = load("command_a")
    call: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "x", "content": "7"}
    turn = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    user = {"role": "user", "content": "a"}
    text = template.text(template.first([user, *turn, *turn], TOOLS), special=True)
    assert text.count('"tool_call_id": "0"') == text.count('"tool_call_id": "1"') == 1
    assert all(one.id is None for one in PARSERS["cohere"].parse(ACTION, TOOLS).calls)


CREATE = '<invoke name="order"><items><item><sku>a</sku></item></items></invoke>'
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
REPORTS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("leehack/llamadart/issues/408", "minimax_m3", m3(NOW), "", [("now", {})]),
    ("NousResearch/hermes-agent/issues/44976", "minimax_m3", m3(CREATE), "", [("order", {"items": [{"sku": "a"}]})]),
    (
        "smg-project/smg/pull/1815",
        "minimax_m3",
        m3('<invoke name="f"><a>1</a> oops <b>2</b></invoke>'),
        "",
        [("f", ...)],
    ),
    (
        "ai-dynamo/frontend-crates/pull/83 5.c",
        "minimax_m3",
        m3('<tool_call><invoke name="search"><query>Pa'),
        "",
        [("search", ...)],
    ),
    (
        "ai-dynamo/frontend-crates/pull/83 5.e",
        "minimax_m3",
        m3(NOW.replace("</tool_call>", "") + '<invoke name="search"><top>3'),
        "",
        [("now", {}), ("search", ...)],
    ),
    (
        "ai-dynamo/frontend-crates/pull/83 5.f",
        "minimax_m3",
        m3('<invoke name="now"></invoke>' + NOW),
        "",
        [("now", {}), ("now", {})],
    ),
    (
        "ml-explore/mlx-lm/pull/1416",
        "minimax_m3",
        "I check."
        + m3(
            '<tool_call>\n<invoke name="search">\n<query>a & b < c</query>\n<top>3</top>\n</invoke>\n</tool_call>'
        ).replace("b ]<]minimax[>[<", "b <"),
        "I check.",
        [("search", {"query": "a & b < c", "top": 3})],
    ),
    (
        "sgl-project/sglang/pull/21377",
        "kimi",
        KIMI.format("functionsnow5") + KIMI.format("functions.now6"),
        "",
        [("functionsnow5", {}), ("now6", {})],
    ),  # nothing is guessed
    (
        "lmstudio-ai/lmstudio-bug-tracker/issues/1592",
        "qwen_coder",
        "Some use `<function=...>`, others `<tool_call>`.</think>\n4",
        "4",
        [],
    ),
    (
        "antirez/ds4/issues/11",
        "deepseek",
        "run()\n</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>",
        "run()\n</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>",
        [],
    ),
    (
        "unslothai/unsloth/pull/5620",
        "llama3_json",
        '<|python_tag|>mcp__srv__list-issues.call(repo="octocat/hello")',
        "",
        [("", ...)],
    ),
    (
        "huggingface/transformers/tests (cohere_schema)",
        "cohere",
        '<|START_THINKING|>I should call a tool.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "simple_tool", "parameters": {"temperature_format": "Celsius"}}\n]<|END_ACTION|>',
        "",
        [("simple_tool", {"temperature_format": "Celsius"})],
    ),
]


@pytest.mark.parametrize(("report", "parser", "text", "content", "calls"), REPORTS)
def test_texts_of_public_bug_reports(
    report: str, parser: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    answer = PARSERS[parser].parse(text, TOOLS)
    assert [(call.name, json.loads(call.arguments) if call.error is None else ...) for call in answer.calls] == calls
    assert answer.content == content, report
