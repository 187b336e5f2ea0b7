# ruff: noqa: E501, RUF001 - an example stands in one line; wide bars and colons are the models' own
"""Parsers of further families: their documented texts, what is malformed, and texts of public bug reports."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.inference.tool_parsers import PARSERS, parser_for
from tests.inference.parser_cases import Calls, assert_malformed, assert_parsed
from tests.inference.sampled_turns import assert_comes_back, rendered, tools_for
from tests.inference.test_template_zoo import ENDS, FAMILIES, load

PARSER_OF = {
    "deepseek_v3_1": "deepseek", "deepseek_v3_2": "deepseek", "deepseek_v4": "deepseek", "deepseek_v4_1": "deepseek",
    "ernie_4_5": "ernie", "glm_4_7": "glm", "hunyuan_a13b": "hunyuan", "hunyuan_v3": "hunyuan_v3",
    "hunyuan_v3_opensource": "hunyuan_v3_opensource", "kimi_k2": "kimi", "kimi_k3": "kimi_k3", "llama4": "llama3_json",
    "mistral_v7": "mistral", "mistral_v11": "mistral", "mistral_v13": "mistral", "qwen3_coder": "qwen_coder",
    "seed_oss": "seed", "xlam": "llama3_json",
}  # fmt: skip
MINE = sorted(PARSER_OF)


@pytest.mark.parametrize("family", MINE)
def test_the_parser_of_a_family_is_chosen_from_its_template(family: str) -> None:
    assert parser_for(FAMILIES[family].read_text()).name == PARSER_OF[family]


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3))
calls_of = st.dictionaries(names, st.dictionaries(names, values, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("family", MINE)
def test_calls_that_a_template_renders_come_back(family: str) -> None:
    template = load(family)

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(calls=calls_of)
    def check(calls: dict[str, dict[str, Any]]) -> None:
        assert_comes_back(template, rendered(template, list(calls.items()), ENDS))

    check()


TOOLS = tools_for([("search", {"query": "x", "top": 1, "when": {}, "ids": []}), ("now", {})])
KIMI = "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
GLM_SEP = "<tool_call>search<tool_sep>\n<arg_key>query</arg_key>\n<arg_value>Kö</arg_value>\n<arg_key>top</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
FOUND: Calls = [("search", {"query": "Kö", "top": 3})]
SEED = "<seed:tool_call>\n<function=search>\n<parameter=query>{}</parameter>\n<parameter=top>3</parameter>\n</function>\n</seed:tool_call>"

# fmt: off
WELL_FORMED: list[tuple[str, str, str, str | None, Calls]] = [
    ("kimi", "<think>hm</think>I look.<|tool_calls_section_begin|>" + KIMI.replace("{}", '{"query": "Kö", "top": 3}') + "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "I look.", "hm", [*FOUND, ("now", {})]),
    ("kimi", "<|tool_call_section_begin|>\n<|tool_call_begin|>\nfunctions.get-it.v2:12<|tool_call_argument_begin|>\n{\n}\n<|tool_call_end|>\n<|tool_call_section_end|>", "", None, [("get-it.v2", {})]),
    ("kimi", "<|tool_call_begin|>search:3<|tool_call_argument_begin|>{\"query\": \"<|tool_call_end|>\"}", "", None, [("search", {"query": "<|tool_call_end|>"})]),
    ("kimi", "No call.", "No call.", None, []),
    ("kimi_k3", '<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|><|open|>argument key="query" type="string"<|sep|>Kö<|close|>argument<|sep|><|open|>argument key="top" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>', "I look.", "hm", [*FOUND, ("now", {})]),
    ("kimi_k3", '<|open|>call tool="search" index="1"<|sep|><|open|>json type="object"<|sep|>{"query": "<|close|>call<|sep|>"}<|close|>json<|sep|><|close|>call<|sep|>', "", None, [("search", {"query": "<|close|>call<|sep|>"})]),
    ("kimi_k3", '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a&quot;&amp;amp;" type="null"<|sep|>null<|close|>argument<|sep|><|close|>call<|sep|>', "", None, [("f", {'a"&amp;': None})]),
    ("seed", "<seed:think>hm</seed:think>\nI look.\n\n" + SEED.replace("{}", "Kö"), "I look.", "hm", FOUND),
    ("seed", "<seed:tool_call><function=search><parameter=when>{'a': [None, True, \"it's\"]}</parameter><parameter=ids>[1, 2]</parameter></function></seed:tool_call>", "", None, [("search", {"when": {"a": [None, True, "it's"]}, "ids": [1, 2]})]),
    ("seed", SEED.replace("{}", "['Kö']"), "", None, [("search", {"query": "['Kö']", "top": 3})]),
    ("seed", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", "", None, [("now", {})]),
    ("ernie", "hm\n</think>\n\n\n<tool_call>\n{\"name\": \"search\", \"arguments\": {\"query\": \"Kö\", \"top\": 3}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n", "", "hm", [*FOUND, ("now", {})]),
    ("ernie", "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>", "", None, [("now", {})]),
    ("ernie", "<think>\nhm\n</think>\n\n\n<response>\nIt is <b>3</b>.\n</response>\n", "It is <b>3</b>.", "hm", []),
    ("ernie", "hm\n</think>\n<response>\nIt is", "It is", "hm", []),
    ("ernie", "A <response> is due.", "A <response> is due.", None, []),
    ("hunyuan", "<think>\nhm\n</think>\n<answer>\n<tool_calls>[{\"name\": \"search\", \"arguments\": {\"query\": \"Kö\", \"top\": 3}}, {\"name\": \"now\", \"arguments\": {}}]</tool_calls>\n</answer>", "", "hm", [*FOUND, ("now", {})]),
    ("hunyuan", "<tool_calls>[{\"name\": \"search\", \"arguments\": {\"query\": \"</tool_calls>\"}}]", "", None, [("search", {"query": "</tool_calls>"})]),
    ("hunyuan", "助手：Thanks. <answer>4</answer>", "Thanks. <answer>4</answer>", None, []),
    ("hunyuan", "<think>\n\n</think>\n<answer>\n助手：It is 4.\n</answer>", "It is 4.", None, []),
    ("hunyuan_v3", "<think>hm</think>I look.<tool_calls>\n" + GLM_SEP + "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", "I look.", "hm", [*FOUND, ("now", {})]),
    ("hunyuan_v3", f"<tool_calls>\n{GLM_SEP}</tool_calls>", "", None, FOUND),
    ("hunyuan_v3_opensource", f"<tool_calls>\n{GLM_SEP}</tool_calls>".replace(">", ":opensource>"), "", None, FOUND),
    ("hunyuan_v3_opensource", ("<think>hm</think>I look.<tool_calls>\n" + GLM_SEP + "</tool_calls>").replace(">", ":opensource>"), "I look.", "hm", FOUND),
    ("glm", "hm</think>I look.<tool_call>search<arg_key>query</arg_key><arg_value>Kö</arg_value><arg_key>top</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>", "I look.", "hm", [*FOUND, ("now", {})]),
    ("deepseek", '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="search">\n<｜DSML｜ parameter name="query" string="true">Kö</｜DSML｜ parameter>\n<｜DSML｜ parameter name="top" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>', "", None, FOUND),
    ("llama3_json", '[{"name": "find", "arguments": {"query": "Kö"}}, {"name": "now", "arguments": {}}]', "", None, [("find", {"query": "Kö"}), ("now", {})]),
    ("pythonic", "<|tool_call_start|>[search(query='two\nlines \"here\"', top=3), now()]<|tool_call_end|>", "", None, [("search", {"query": 'two\nlines "here"', "top": 3}), ("now", {})]),
]

MALFORMED: list[tuple[str, str, str, str]] = [
    ("kimi", KIMI.replace("{}", '{"query": '), "search", "not valid JSON"),
    ("kimi", KIMI.replace("functions.search:0", "functions.:0"), "", "cannot be read"),
    ("kimi", KIMI.replace("{}", "[1]"), "search", "got array"),
    ("kimi", "<|tool_calls_section_begin|>", "", "cannot be read"),
    ("kimi", KIMI.replace("{}", '{"a": 1}}'), "search", "Extra data"),
    ("kimi_k3", '<|open|>call tool="search" index="1"<|sep|><|open|>argument key="top" type="number"<|sep|>three<|close|>argument<|sep|><|close|>call<|sep|>', "search", "'top': not valid JSON"),
    ("kimi_k3", '<|open|>call tool="search" index="1"<|sep|>{"top": 3}', "search", "not closed"),
    ("kimi_k3", "<|open|>call<|sep|>", "", "has no name"),
    ("seed", SEED.replace(">3<", ">three<"), "search", "'top': want integer"),
    ("seed", SEED.replace("</parameter>\n<parameter=top>", "<parameter=top>"), "search", "not closed"),
    ("seed", "<seed:tool_call><function=search><parameter=when>{'a': f(1)}</parameter></function></seed:tool_call>", "search", "not an expression"),
    ("seed", "<seed:tool_call><function=search><parameter=when>{'a': </parameter></function></seed:tool_call>", "search", "want object"),
    ("ernie", "<tool_call>\n{\"name\": \"search\"}\n</tool_call>", "search", "has no arguments"),
    ("hunyuan", "<tool_calls>[]</tool_calls>", "", "is empty"),
    ("hunyuan", "<tool_calls>[{\"name\": \"search\", \"arguments\": {]</tool_calls>", "search", "not valid JSON"),
    ("hunyuan", "<tool_calls>", "", "got nothing"),
    ("hunyuan_v3", "<tool_calls>\n" + GLM_SEP.replace("<arg_value>3", "<arg_value>three") + "</tool_calls>", "search", "'top': want integer"),
    ("pythonic", "<|tool_call_start|>[search(top=f(1), query='two\nlines')]<|tool_call_end|>", "search", "not an expression"),
    ("hunyuan_v3", "<tool_calls>\n" + GLM_SEP.replace("</tool_call>", ""), "search", "not closed"),
]
# fmt: on


@pytest.mark.parametrize(("parser", "text", "content", "reasoning", "calls"), WELL_FORMED)
def test_documented_texts(parser: str, text: str, content: str, reasoning: str | None, calls: Calls) -> None:
    assert_parsed(parser, text, TOOLS, content, reasoning, calls)


@pytest.mark.parametrize(("parser", "text", "name", "error"), MALFORMED)
def test_a_malformed_call_says_what_is_wrong_and_keeps_the_words(parser: str, text: str, name: str, error: str) -> None:
    assert_malformed(parser, text, TOOLS, name, error)


@pytest.mark.parametrize(("parser", "bad", "good"), [
    ("kimi", KIMI.replace("{}", "{"), KIMI),
    ("kimi_k3", '<|open|>call tool="f"<|sep|>{', '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'),
    ("seed", "<seed:tool_call><function=f><parameter=a>1</function></seed:tool_call>", SEED),
    ("ernie", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    ("hunyuan", '<tool_calls>[{"name": "f", "arg', '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'),
    ("hunyuan_v3", "<tool_call>f<tool_sep><arg_key>a</arg_key></tool_call>", GLM_SEP),
])  # fmt: skip
def test_a_malformed_call_does_not_take_the_next_one_with_it(parser: str, bad: str, good: str) -> None:
    first, second = PARSERS[parser].parse(bad + good, TOOLS).calls
    assert first.error is not None and first.arguments in bad
    assert second.error is None


@pytest.mark.parametrize(
    "damage", ["", '"', "{", "}", "<", "</", "<|", "\n", ":", "<|tool_call_end|>", "</tool_calls>"]
)
@pytest.mark.parametrize("parser", ["kimi", "kimi_k3", "seed", "hunyuan", "hunyuan_v3", "ernie"])
def test_a_damaged_call_is_never_lost_and_never_another(parser: str, damage: str) -> None:
    text, _, _, calls = next((row[1], *row[2:]) for row in WELL_FORMED if row[0] == parser and row[4])
    for at in range(text.index("search") - 1, len(text)):
        for taken in (0, 3):
            answer = PARSERS[parser].parse(text[:at] + damage + text[at + taken :], TOOLS)
            assert answer.calls
            assert all(call.error is not None or json.loads(call.arguments) is not None for call in answer.calls)
    assert calls


PIECES = [
    piece
    for _, text, *_ in [*WELL_FORMED, *MALFORMED]
    for piece in re.split(r"(<[^<>]{1,60}>|[{}\"'\n\[\]])", text)
    if piece
]


def check_answers(parser: str, count: int) -> None:
    """Takes answers apart that are made of pieces of the documented texts, or are those texts with damage."""
    rng = random.Random(parser)
    texts = [text for _, text, *_ in [*WELL_FORMED, *MALFORMED]]
    for _ in range(count):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 25)))
        if rng.random() < 0.5:
            text = rng.choice(texts)
            for _ in range(rng.randint(1, 3)):
                start = rng.randint(0, len(text))
                text = text[:start] + rng.choice(["", *PIECES]) + text[start + rng.randint(0, 10) :]
        for call in PARSERS[parser].parse(text, TOOLS).calls:
            if call.error is None:
                assert isinstance(json.loads(call.arguments), dict)
                assert call.name in text
            else:
                assert call.arguments in text
                assert "\n" not in call.error


@pytest.mark.parametrize("parser", PARSERS)
def test_no_answer_raises_or_loses_the_words_of_a_call(parser: str) -> None:
    check_answers(parser, 1_000)


@pytest.mark.long
@pytest.mark.parametrize("parser", PARSERS)
def test_none_of_many_answers_raises_or_loses_the_words_of_a_call(parser: str) -> None:
    check_answers(parser, 100_000)


# Texts of public bug reports, and what a reader of the answer must find.
DSML = '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">Kö</｜DSML｜parameter>\n<｜DSML｜parameter name="top" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
CODER = "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n</function>\n</tool_call>"
REPORTS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("vllm-project/vllm/issues/32213", "glm", "<tool_call>now</tool_call>", "", [("now", {})]),
    ("vllm-project/vllm/issues/49248", "glm", "<tool_call>search<arg_key>query</arg_key>how many vacation days left</arg_value></tool_call>", "", [("search", ...)]),
    ("sgl-project/sglang/issues/30644", "glm", "<tool_call>search<arg_key>query</arg_key><arg_value>123_456</arg_value></tool_call>", "", [("search", {"query": "123_456"})]),
    ("sgl-project/sglang/issues/30644", "glm", "<tool_call>search<arg_key>other</arg_key><arg_value>123_456</arg_value></tool_call>", "", [("search", {"other": "123_456"})]),
    ("vllm-project/vllm/issues/24478", "kimi", KIMI.replace("{}", '{"lat":34}') + "<|tool_call_begin|>functions.get_news:1<|tool_call_argument_begin|>{\"a\": \"<b>\"}<|tool_call_end|>", "", [("search", {"lat": 34}), ("get_news", {"a": "<b>"})]),
    ("vllm-project/vllm/pull/22149", "kimi", KIMI.replace("search", "web-search"), "", [("web-search", {})]),
    ("vllm-project/vllm/issues/41739", "kimi", KIMI.replace("{}", '{"input": "{"key": "value"...}"'), "", [("search", ...)]),
    ("smg-project/smg/pull/1636", "kimi", KIMI.replace("{}", '{\n  "query": "a",\n  "top": 1\n}'), "", [("search", {"query": "a", "top": 1})]),
    ("sgl-project/sglang/issues/25358", "kimi", "<|tool_calls_section_begin|><|tool_call_begin|>call00003<|tool_call_argument_begin|>{}<|tool_call_end|>", "", [("call00003", {})]),  # nobody can know the name
    ("exo-explore/exo/pull/1757", "kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.shell!166", "", [("", ...)]),
    ("ml-explore/mlx-lm/pull/1310", "qwen_coder", CODER.replace("query", "top").replace("{}", "2026-01-15"), "", [("search", ...)]),
    ("ml-explore/mlx-lm/issues/1236", "qwen_coder", CODER.replace("query", "ids").replace("{}", "[1234, 1235]") + CODER.replace("{}", "2026-01-15T10:00"), "", [("search", {"ids": [1234, 1235]}), ("search", {"query": "2026-01-15T10:00"})]),
    ("vllm-project/vllm/issues/39771", "qwen_coder", CODER.replace("<parameter=query>", "<parameter=query") + CODER.replace("{}", "a"), "", [("search", ...), ("search", {"query": "a"})]),
    ("vllm-project/vllm/pull/34919", "qwen_coder", CODER.replace("{}", "A block ends with </parameter> here."), "", [("search", {"query": "A block ends with </parameter> here."})]),
    ("raullenchai/Rapid-MLX/issues/1515", "qwen_coder", CODER.replace("{}", "A block ends with </tool_call> on its own."), "", [("search", {"query": "A block ends with </tool_call> on its own."})]),
    ("verl-project/verl/pull/6542", "qwen_coder", CODER.replace("query", "ids").replace("{}", '__import__("os").system("false")'), "", [("search", ...)]),
    ("verl-project/verl/issues/4757", "hermes", '<think> \nlet me call \n<tool_call>{"name": "now", "arguments": {}}</tool_call> \nit will\n</think>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [("now", {})]),
    ("vllm-project/vllm/issues/45167", "hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "echo </tool_call> test"}}\n</tool_call>', "", [("search", {"query": "echo </tool_call> test"})]),
    ("huggingface/trl/issues/4708", "hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {"a": 2}}\n</tool_call>', "", [("now", {"a": 1}), ("now", {"a": 2})]),
    ("huggingface/trl/pull/4890", "hermes", "<tool_call>{}</tool_call>", "", [("", ...)]),
    ("vllm-project/vllm/pull/30724", "mistral", 'A set {1, 2}.[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "A set {1, 2}.", [("now", {})]),
    ("ml-explore/mlx-lm/pull/1448", "mistral", '[TOOL_CALLS]search[ARGS]{"query": "TODO"}\n\nLet me search for that.', "Let me search for that.", [("search", {"query": "TODO"})]),
    ("vllm-project/vllm/pull/5649", "mistral", "[TOOL_CALLS][{'name': 'search', 'arguments': {'query': 'Dallas'}}]$$ In order to", "", [("search", ...)]),
    ("vllm-project/vllm/pull/27701", "llama3_json", '{\n"name": "search",\n"parameters": {"record": {"age": "42", "deep": {"zip": "Unknown"}}}\n}', "", [("search", {"record": {"age": "42", "deep": {"zip": "Unknown"}}})]),
    ("ggml-org/llama.cpp/issues/20260", "llama3_json", '{"name": "now", "parameters": {}}; {"name": "search", "parameters": {"query": "a"}}; {"name": "now", "parameters": {}}', "", [("now", {}), ("search", {"query": "a"}), ("now", {})]),
    ("vllm-project/vllm/issues/30722", "pythonic", '[search(ids=[["a", "b"], ["c"]], query="x"', "", [("search", ...)]),
    ("vllm-project/vllm/issues/30722", "pythonic", '[search(ids=[["a", "b"], ["c"]], query="x")]', "", [("search", {"ids": [["a", "b"], ["c"]], "query": "x"})]),
    ("vllm-project/vllm/issues/48931", "deepseek", f"I look.\n{DSML}</｜DSML｜tool_calls>", "I look.", FOUND),
    ("sgl-project/sglang/issues/40236", "deepseek", f"<｜DSML｜tool_calls>\n{DSML}", "", FOUND),
    ("sgl-project/sglang/issues/40236", "deepseek", f"<｜DSML｜tool_calls>\n{DSML.replace('>3<', '>three<')}{DSML}</｜DSML｜tool_calls>", "", [("search", ...), *FOUND]),
]  # fmt: skip


@pytest.mark.parametrize(("report", "parser", "text", "content", "calls"), REPORTS)
def test_texts_of_public_bug_reports(
    report: str, parser: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    answer = PARSERS[parser].parse(text, TOOLS)
    assert [(call.name, json.loads(call.arguments) if call.error is None else ...) for call in answer.calls] == calls
    assert answer.content == content, report
