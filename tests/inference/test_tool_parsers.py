# ruff: noqa: E501, RUF001 - an example stands in one line; the wide bars are DeepSeek's own
"""Tool parsers: each format's own examples, what is malformed, round trips, and any text at all."""

import json
import keyword
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentrl.inference.tool_parsers import PARSERS, ParsedAnswer, ParsedCall, parser_for
from tests.inference.parser_cases import Calls, assert_malformed, assert_parsed, read_calls

# fmt: off
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "fine": {"type": "boolean"}, "unit": {"enum": ["C", "F"]},
        "wind": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "note": {"type": ["string", "null"]},
        "spot": {"$ref": "#/$defs/Spot"}, "any": {},
    },
    "$defs": {"Spot": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": None}},
]
BERLIN = {"city": "Berlin", "days": 3}
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin", "days": 3}}\n</tool_call>'
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
V3 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Berlin", "days": 3}\n```<｜tool▁call▁end｜>{more}<｜tool▁calls▁end｜>'
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Berlin</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
# fmt: on
HARMONY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"

WELL_FORMED: list[tuple[str, str, str, str | None, Calls]] = [
    ("hermes", HERMES, "", None, [("get_weather", BERLIN)]),
    ("hermes", f"<think>\nhm\n</think>\n\nLet me see.\n{HERMES}\n{HERMES}", "Let me see.", "hm", [("get_weather", BERLIN)] * 2),
    ("hermes", f"thought so far\n</think>\n{HERMES}", "", "thought so far", [("get_weather", BERLIN)]),
    ("hermes", HERMES.removesuffix("\n</tool_call>") + " ", "", None, [("get_weather", BERLIN)]),
    ("hermes", HERMES.removesuffix("</tool_call>") + HERMES, "", None, [("get_weather", BERLIN)] * 2),
    ("hermes", '<tool_call>{ "arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call> end', "end", None, [("f", {"a": "</tool_call>"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x</think>y"}}</tool_call>', "", None, [("f", {"a": "x</think>y"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", None, [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "é", "arguments": {"ü": "日本\\n🙂"}}</tool_call>', "", None, [("é", {"ü": "日本\n🙂"})]),
    ("hermes", "<think></think>Nothing to call.", "Nothing to call.", None, []),
    ("hermes", f"<think>I could write {HERMES} but", "", f"I could write {HERMES} but", []),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Berlin", "days": 3}}', "", None, [("get_weather", BERLIN)]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "f", "parameters": {"a": 1}}', "", None, [("now", {}), ("f", {"a": 1})]),
    ("llama3_json", '<|python_start|>Look:<|python_end|>{"name": "now", "parameters": {}}{"name": "now", "parameters": {}}', "Look:", None, [("now", {})] * 2),
    ("llama3_json", '{"type": "function", "function": "now", "parameters": {}}', "", None, [("now", {})]),
    ("llama3_json", 'A schema: {"name": "f", "parameters": {"type": "object"}}', 'A schema: {"name": "f", "parameters": {"type": "object"}}', None, []),
    ("llama3_json", '{"answer": 5}', '{"answer": 5}', None, []),
    ("mistral", 'Sure.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Berlin", "days": 3}, "id": "abcdefghi"}, {"name": "now", "arguments": {}}]', "Sure.", None, [("get_weather", BERLIN), ("now", {})]),
    ("mistral", '[THINK]hm[/THINK][TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Berlin", "days": 3}[TOOL_CALLS]now[ARGS]{}', "", "hm", [("get_weather", BERLIN), ("now", {})]),
    ("mistral", '[TOOL_CALLS]f{"a": "[TOOL_CALLS]g[ARGS]{}"}\n\nDone.', "Done.", None, [("f", {"a": "[TOOL_CALLS]g[ARGS]{}"})]),
    ("deepseek", "I look." + V3.replace("{more}", ""), "I look.", None, [("get_weather", BERLIN)]),
    ("deepseek", V3.replace("{more}", "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"), "", None, [("get_weather", BERLIN), ("now", {})]),
    ("deepseek", 'r</think>c<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "c", "r", [("now", {}), ("f", {"a": 1})]),
    ("deepseek", f"Both.\n\n{DSML}", "Both.", None, [("get_weather", BERLIN)]),
    ("deepseek", '<｜DSML｜tool_calls><｜DSML｜invoke name="now"></｜DSML｜invoke>\n<｜DSML｜invoke name="f">{"a": [1]}</｜DSML｜invoke></｜DSML｜tool_calls>', "", None, [("now", {}), ("f", {"a": [1]})]),
    ("qwen_coder", f"I look.\n{CODER}\n{CODER}", "I look.", None, [("get_weather", BERLIN)] * 2),
    ("qwen_coder", CODER.removeprefix("<tool_call>\n"), "", None, [("get_weather", BERLIN)]),
    ("qwen_coder", "Write <function=NAME> to call.", "Write <function=NAME> to call.", None, []),
    ("qwen_coder", "<tool_call><function=get_weather><parameter=city>\n 5</parameter>\n\n</parameter><parameter=fine>True</parameter><parameter=wind>None</parameter><parameter=note>5</parameter><parameter=unit>F</parameter></function></tool_call>", "", None, [("get_weather", {"city": " 5</parameter>\n", "fine": True, "wind": None, "note": "5", "unit": "F"})]),
    ("qwen_coder", '<tool_call><function=get_weather><parameter=spot>{"lat": 1}</parameter><parameter=any>[1]</parameter><parameter=other>x</parameter><parameter=wind>1</parameter><parameter=days>2.0</parameter></function></tool_call>', "", None, [("get_weather", {"spot": {"lat": 1}, "any": [1], "other": "x", "wind": 1, "days": 2})]),
    ("qwen_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", None, [("now", {})]),
    ("glm", f"\n<think>hm</think>\nI look.\n{GLM}\n{GLM}", "I look.", "hm", [("get_weather", BERLIN)] * 2),
    ("glm", "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key><arg_value>a</tool_call>b</arg_value></tool_call>", "", None, [("now", {}), ("get_weather", {"city": "a</tool_call>b"})]),
    ("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + HARMONY + '{"city": "Berlin", "days": 3}<|call|>', "", "hm", [("get_weather", BERLIN)]),
    ("harmony", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Berlin", "days": 3}', "", None, [("get_weather", BERLIN)]),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>commentary<|message|>Plan<|end|><|start|>assistant to=functions.now<|channel|>analysis<|message|>{}", "Plan", "a\nb", [("now", {})]),
    ("harmony", "<|channel|>final<|message|>Done, to=functions.now<|return|>", "Done, to=functions.now", None, []),
    ("harmony", HARMONY + '{"city": "<|end|>"}<|call|>', "", None, [("get_weather", {"city": "<|end|>"})]),
    ("harmony", "to=functions.now<|message|>{}", "", None, [("now", {})]),
    ("harmony", "I call now() to=functions.now<|channel|>commentary<|message|>{}", "I call now()", None, [("now", {})]),
    ("harmony", "just text", "just text", None, []),
    ("pythonic", '[get_weather(city="Berlin", days=3), now()]', "", None, [("get_weather", BERLIN), ("now", {})]),
    ("pythonic", "[a.b(x=-1.5, y=[1, (2, true)], z={'k': None}, w='it\\'s [')]", "", None, [("a.b", {"x": -1.5, "y": [1, [2, True]], "z": {"k": None}, "w": "it's ["})]),
    ("pythonic", "First. [now()] See [this](link) and [f(x)].", "First.  See [this](link) and [f(x)].", None, [("now", {})]),
    ("pythonic", "<|tool_call_start|>[now()]<|tool_call_end|>I look.", "I look.", None, [("now", {})]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", None, [("now", {})]),
    ("json", 'I call\n```json\n{"name": "get_weather", "arguments": {"city": "Berlin", "days": 3}}\n```\nnow', "I call\n\nnow", None, [("get_weather", BERLIN)]),
    ("json", '[{"name": "now", "arguments": {}}, {"function": {"name": "f", "arguments": "{}"}}] ', "", None, [("now", {}), ("f", {})]),
    ("json", 'Use {" and {"name": "now", "parameters": {}}', 'Use {" and', None, [("now", {})]),
    ("json", '{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', None, []),
]  # fmt: skip

MALFORMED: list[tuple[str, str, str, str]] = [
    ("hermes", "<tool_call></tool_call>", "", "got nothing"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', "f", "Extra data at character 37"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "f", "Unterminated string"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "f", "line break"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "'f': want a JSON object, got array"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "f", "not valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', "f", "got array"),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "f", "got null"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "f", "has no arguments"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", "has no name"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "", "has no name"),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "", "got array"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "f", "NaN is no JSON number"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', "f", "Infinity is no JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "f", "Out of range float"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "f", "many digits"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', "f", "surrogate"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>", "f", "levels"),
    ("llama3_json", '<|python_tag|>print("hi")', "", "not JSON"),
    ("llama3_json", '<|python_tag|>{"query": "x"}', "", "has no name"),
    ("llama3_json", '{"name": "now"}', "now", "has no arguments"),
    ("llama3_json", '{"name": "g", "parameters": {"a": }}', "g", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]", "", "no JSON arguments"),
    ("mistral", "[TOOL_CALLS] now", "now", "no JSON arguments"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}}', "f", "Extra data"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', "f", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", "f", "got array"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, ', "f", "not valid JSON"),
    ("mistral", "[TOOL_CALLS] []", "", "is empty"),
    ("mistral", "[TOOL_CALLS] [5]", "", "got integer"),
    ("deepseek", "<｜tool▁calls▁begin｜>", "", "cannot be read"),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": <｜tool▁call▁end｜>', "f", "Expecting value"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "f", "got array"),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}}<｜tool▁call▁end｜>', "f", "Extra data"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{1}<｜tool▁call▁end｜>", "f", "not valid JSON"),
    ("deepseek", DSML.replace(">3<", ">three<"), "get_weather", "'days': not valid JSON"),
    ("deepseek", DSML.partition("</｜DSML｜invoke>")[0], "get_weather", "not closed"),
    ("deepseek", "<｜DSML｜function_calls>now()", "", "has no name"),
    ("qwen_coder", "<tool_call>now()</tool_call>", "", "has no name"),
    ("qwen_coder", CODER.replace("3", "three"), "get_weather", "'days': want integer, got 'three'"),
    ("qwen_coder", CODER.replace("Berlin\n</parameter>", "Berlin"), "get_weather", "'city' is not closed"),
    ("qwen_coder", CODER.partition("</function>")[0], "get_weather", "not closed"),
    ("qwen_coder", "<function=now>then", "now", "not closed"),
    ("glm", GLM.removesuffix("</tool_call>"), "get_weather", "not closed"),
    ("glm", GLM.replace("</arg_value>", ""), "get_weather", "'city' is not closed"),
    ("glm", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", "has no name"),
    ("harmony", HARMONY + "[1]<|call|>", "get_weather", "got array"),
    ("harmony", HARMONY + "<|call|>", "get_weather", "got nothing"),
    ("harmony", HARMONY.removesuffix("<|message|>"), "get_weather", "ends before its arguments"),
    ("harmony", "<|channel|>commentary to=functions.<|message|>{}", "", "has no name"),
    ("pythonic", "[get_weather(city=Berlin)]", "get_weather", "want a plain value"),
    ("pythonic", '[get_weather("Berlin")]', "get_weather", "each argument needs its name"),
    ("pythonic", "[get_weather(**{})]", "get_weather", "each argument needs its name"),
    ("pythonic", '[get_weather(city="Berlin"', "get_weather", "not valid Python"),
    ("pythonic", "[now(a=1e999)]", "now", "Out of range float"),
    ("pythonic", "[now(a={1: 2})]", "now", "key of a dict"),
    ("pythonic", "[now(a=" + "[" * 200 + "]" * 200 + ")]", "now", "levels"),
    ("pythonic", "<|tool_call_start|>now<|tool_call_end|>", "", "NAME(KEY=VALUE)"),
    ("pythonic", "<|tool_call_start|>[]<|tool_call_end|>", "", "is empty"),
    ("json", 'I call {"name": "now", "arguments": {"a": x}} there', "now", "not valid JSON"),
    ("json", "{'name': 'now', 'arguments': {}}", "now", "double quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "content", "reasoning", "calls"), WELL_FORMED)
def test_examples_of_each_format(parser: str, text: str, content: str, reasoning: str | None, calls: Calls) -> None:
    assert_parsed(parser, text, TOOLS, content, reasoning, calls)


@pytest.mark.parametrize(("parser", "text", "name", "error"), MALFORMED)
def test_a_malformed_call_says_what_is_wrong_and_keeps_the_words(parser: str, text: str, name: str, error: str) -> None:
    assert_malformed(parser, text, TOOLS, name, error)


# fmt: off
REPEATED = [
    ("hermes", HERMES.replace('"city": "Berlin"', '"days": 4')),
    ("hermes", HERMES.replace('{"name"', '{"name": "days", "name"')),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 1, \\"days\\": 1}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"spot": [{"days": 1, "days": 2}]}}</tool_call>'),
    ("llama3_json", '{"name": "get_weather", "parameters": {"days": 4, "days": 3}}'),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"days": 4, "days": 3}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"days": 4, "days": 3}}]'),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"days": 4, "days": 3}'),
    ("deepseek", V3.replace('"city": "Berlin"', '"days": 4').replace("{more}", "")),
    ("deepseek", '<｜DSML｜invoke name="get_weather">{"days": 4, "days": 3}</｜DSML｜invoke>'),
    ("deepseek", DSML.replace('name="city"', 'name="days"')),
    ("deepseek", DSML.replace('>3<', '>{"days": 4, "days": 3}<')),
    ("qwen_coder", CODER.replace("city", "days").replace("Berlin", "4")),
    ("qwen_coder", CODER.replace("city", "spot").replace("Berlin", '{"days": 4, "days": 3}')),
    ("glm", GLM.replace("city", "days").replace("Berlin", "4")),
    ("glm", GLM.replace("city", "spot").replace("Berlin", '{"days": 4, "days": 3}')),
    ("kimi", '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"days": 4, "days": 3}<|tool_call_end|>'),
    ("kimi_k3", '<|open|>call tool="get_weather" index="1"<|sep|>' + '<|open|>argument key="days" type="number"<|sep|>4<|close|>argument<|sep|>' * 2 + "<|close|>call<|sep|>"),
    ("seed", "<seed:tool_call><function=get_weather><parameter=days>4</parameter><parameter=days>3</parameter></function></seed:tool_call>"),
    ("seed", "<seed:tool_call><function=get_weather><parameter=spot>{'days': 4, 'days': 3}</parameter></function></seed:tool_call>"),
    ("ernie", HERMES.replace('"city": "Berlin"', '"days": 4')),
    ("hunyuan", '<tool_calls>[{"name": "get_weather", "arguments": {"days": 4, "days": 3}}]</tool_calls>'),
    ("hunyuan_v3", GLM.replace("get_weather", "get_weather<tool_sep>").replace("city", "days").replace("Berlin", "4")),
    ("hunyuan_v3_opensource", GLM.replace("get_weather", "get_weather<tool_sep>").replace("city", "days").replace("Berlin", "4").replace(">", ":opensource>")),
    ("harmony", HARMONY + '{"days": 4, "days": 3}<|call|>'),
    ("gemma", "<|tool_call>call:get_weather{days:4,days:3}<tool_call|>"),
    ("gemma", "<|tool_call>call:get_weather{spot:{days:4,days:3}}<tool_call|>"),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"days": 4, "days": 3}}]'),
    ("phi4_mini", 'functools[{"name": "get_weather", "arguments": {"days": 4, "days": 3}}]'),
    ("minimax_m1", '<tool_calls>\n{"name": "get_weather", "arguments": {"days": 4, "days": 3}}\n</tool_calls>'),
    ("minimax_m2", '<minimax:tool_call><invoke name="get_weather"><parameter name="days">4</parameter><parameter name="days">3</parameter></invoke></minimax:tool_call>'),
    ("muse", ' to=get_weather<|message|><atem:invoke name="get_weather"><atem:parameter name="days">4</atem:parameter><atem:parameter name="days">3</atem:parameter></atem:invoke>'),
    ("pythonic", "[get_weather(days=4, days=3)]"),
    ("pythonic", "[get_weather(spot={'days': 4, 'days': 3})]"),
    ("json", '```json\n{"name": "get_weather", "arguments": {"days": 4, "days": 3}}\n```'),
]
# fmt: on


@pytest.mark.parametrize(("parser", "text"), REPEATED)
def test_a_repeated_key_is_refused_and_the_model_is_told_which(parser: str, text: str) -> None:
    call = PARSERS[parser].parse(text, TOOLS).calls[0]
    assert call.name in ("get_weather", "days") and call.error is not None
    assert ("'days' is given twice" in call.error) or "'name' is given twice" in call.error
    assert call.arguments in text


def test_every_format_has_a_case_of_a_repeated_key() -> None:
    others = {"minimax_m3", "cohere", "hunyuan_v4"}  # in test_tool_parsers_m3_to_cohere.py
    assert {parser for parser, _ in REPEATED} | others == set(PARSERS)


@pytest.mark.parametrize(("parser", "bad", "good"), [
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": [1, "a,]"]}, ', '{"name": "get_weather", "arguments": {"city": "Berlin", "days": 3}}]'),
    ("pythonic", "[now('a,)', 1), ", 'get_weather(city="Berlin", days=3)]'),
    ("hermes", '<tool_call>{"name": "f", "arg', HERMES),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', '[TOOL_CALLS]get_weather[ARGS]{"city": "Berlin", "days": 3}'),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", V3.replace("{more}", "")),
    ("qwen_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", CODER),
    ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", GLM),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{<|end|>", "<|start|>assistant" + HARMONY + json.dumps(BERLIN)),
    ("json", '{"name": "now", "arguments": {"a": x}}', "\n\n" + json.dumps({"name": "get_weather", "arguments": BERLIN})),
])  # fmt: skip
def test_a_malformed_call_does_not_take_the_next_one_with_it(parser: str, bad: str, good: str) -> None:
    first, second = PARSERS[parser].parse(bad + good, TOOLS).calls
    assert first.error is not None and first.arguments in bad
    assert second == ParsedCall("get_weather", json.dumps(BERLIN))


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3))
keys = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda key: not keyword.iskeyword(key))
calls_of = st.lists(st.tuples(keys, st.dictionaries(keys, values, max_size=4)), min_size=1, max_size=3)
prose = st.text(alphabet="abc é.,!?\n", max_size=20)
TYPE = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", str: "string"}


def tools_for(calls: Calls) -> list[dict[str, Any]]:
    tools: dict[str, Any] = {}
    for name, arguments in calls:
        types = {key: {"type": TYPE.get(type(value), "null")} for key, value in arguments.items()}
        tools[name] = {"type": "function", "function": {"name": name, "parameters": {"properties": types}}}
    return list(tools.values())


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def each(separator: str, part: Any, before: str = "", after: str = "") -> Any:
    return lambda calls: before + separator.join(part(name, arguments) for name, arguments in calls) + after


def tags(template: str, arguments: dict[str, Any]) -> str:
    return "".join(template.replace("KEY", key).replace("VALUE", plain(value)) for key, value in arguments.items())


def dsml(name: str, arguments: dict[str, Any]) -> str:
    tag = '<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>\n'
    inside = "".join(tag % (key, dumped(isinstance(value, str)), plain(value)) for key, value in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n'


RENDERED: dict[str, tuple[str, Any]] = {  # name: the parser, and a text with these calls
    "hermes": ("hermes", each("\n", lambda n, a: f'<tool_call>\n{dumped({"name": n, "arguments": a})}\n</tool_call>')),
    "hermes, arguments as text": ("hermes", each("", lambda n, a: f'<tool_call>{dumped({"arguments": json.dumps(a), "name": n})}</tool_call>')),
    "llama": ("llama3_json", each("; ", lambda n, a: dumped({"name": n, "parameters": a}), "<|python_tag|>")),
    "mistral": ("mistral", each(", ", lambda n, a: dumped({"name": n, "arguments": a}), "[TOOL_CALLS] [", "]")),
    "mistral v11": ("mistral", each("", lambda n, a: f"[TOOL_CALLS]{n}[CALL_ID]123456789[ARGS]{dumped(a)}")),
    "mistral v13": ("mistral", each("", lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}")),
    "deepseek v3": ("deepseek", each("\n", lambda n, a: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
    "deepseek v3.1": ("deepseek", each("", lambda n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
    "deepseek v3.2": ("deepseek", each("", dsml, "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>")),
    "qwen coder": ("qwen_coder", each("\n", lambda n, a: f"<tool_call>\n<function={n}>\n{tags('<parameter=KEY>' + chr(10) + 'VALUE' + chr(10) + '</parameter>', a)}</function>\n</tool_call>")),
    "glm": ("glm", each("\n", lambda n, a: f"<tool_call>{n}\n{tags('<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>', a)}</tool_call>")),
    "pythonic": ("pythonic", each(", ", lambda n, a: f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})", "[", "]")),
    "lfm2": ("pythonic", each(", ", lambda n, a: f"{n}({', '.join(f'{k}={dumped(v)}' for k, v in a.items())})", "<|tool_call_start|>[", "]<|tool_call_end|>")),
    "json in a fence": ("json", each(", ", lambda n, a: dumped({"name": n, "arguments": a}), "```json\n[", "]\n```")),
    "json": ("json", each("\n", lambda n, a: dumped({"name": n, "arguments": a}))),
}  # fmt: skip


@pytest.mark.parametrize("style", RENDERED)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=calls_of, before=prose, after=prose)
def test_rendered_calls_come_back_with_the_text_around(style: str, calls: Calls, before: str, after: str) -> None:
    calls = list({name: (name, arguments) for name, arguments in calls}.values())  # one schema a tool
    parser, render = RENDERED[style]
    answer = PARSERS[parser].parse(f"{before}\n{render(calls)}\n{after}", tools_for(calls))
    assert read_calls(answer) == calls
    assert answer.content.split() == (before + "\n" + after).split()


@settings(max_examples=40, deadline=None)
@given(calls=calls_of, thought=prose, said=prose)
def test_harmony_comes_back(calls: Calls, thought: str, said: str) -> None:
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary<|message|>{said}"
    for name, arguments in calls:
        text += f"<|end|><|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{dumped(arguments)}"
    answer = PARSERS["harmony"].parse(text, tools_for(calls))
    assert read_calls(answer) == calls
    assert (answer.content, answer.reasoning or "") == (said.strip(), thought.strip())


def check(parser: str, text: str) -> ParsedAnswer:
    answer = PARSERS[parser].parse(text, TOOLS)
    assert answer.content == answer.content.strip()
    for call in answer.calls:
        if call.error is None:
            assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)
            assert call.name and (call.name + call.arguments).encode()
        else:
            assert "\n" not in call.error and call.error.encode()
            assert call.arguments in text
    return answer


MARKERS = [*"{}[]()\"'\\:,;= \n", "name", "now", "arguments", "think>", "<", "</", "<|", "|>", "｜", "```"]
WHOLE = [text for _, text, *_ in WELL_FORMED] + [text for _, text, *_ in MALFORMED if len(text) < 500]


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet=st.characters(codec=None))
    | st.binary().map(lambda data: data.decode(errors="replace"))
    | st.lists(st.sampled_from([*MARKERS, *WHOLE]), max_size=12).map("".join)
)
@example(text="\ud800{\x00")
def test_any_text_is_taken_apart(parser: str, text: str) -> None:
    check(parser, text)


OPENINGS = {"kimi": "<|tool_call_begin|>", "kimi_k3": "<|open|>call ", "seed": "<seed:tool_call>", "hunyuan": "<tool_calls>", "hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "deepseek": "<｜tool▁call▁begin｜>", "glm": "<tool_call>",
            "qwen_coder": "<tool_call>", "pythonic": "<|tool_call_start|>", "llama3_json": "<|python_tag|>"}  # fmt: skip


@pytest.mark.parametrize("style", RENDERED)
@settings(max_examples=50, deadline=None)
@given(calls=calls_of, data=st.data())
def test_a_damaged_call_is_never_lost(style: str, calls: Calls, data: st.DataObject) -> None:
    parser, render = RENDERED[style]
    text = render(calls)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 10)))
        text = text[:start] + data.draw(st.sampled_from(["", *MARKERS])) + text[stop:]
    answer = check(parser, text)
    if OPENINGS.get(parser, "\0") in text and "think>" not in text:
        assert answer.calls


ADVERSARIAL = {
    "braces": "{" * 200_000,
    "brackets": "[" * 200_000,
    "openings": "<tool_call>" * 20_000,
    "opened objects": '<tool_call>{"a":' * 13_000,
    "opened strings": '<tool_call>{"a":"' * 12_000,
    "nested calls": '{"name":"now","arguments":' * 8_000,
    "calls line by line": '\n{"name":"now",x' * 13_000,
    "deep and closed": '<tool_call>{"name":"now","arguments":' + "[" * 90_000 + "]" * 90_000 + "}</tool_call>",
    "deep Python": "[now(a=" + "(" * 90_000 + ")" * 90_000 + ")]",
    "negations": "[now(a=" + "not " * 50_000 + "1)]",
    "signs": "[now(a=" + "-" * 200_000 + "1)]",
    "attributes": "[now(a=" + "a." * 100_000 + "a)]",
    "sums": "[now(a=" + "1+" * 100_000 + "1)]",
    "Python lists": "[now(a=[" * 25_000,
    "parameters": "<tool_call><function=f><parameter=a></parameter>x" * 4_000,
    "values": "<tool_call>x<arg_key>k</arg_key><arg_value>" * 4_000,
    "DSML": '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">' * 4_000,
    "Kimi": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":' * 4_000,
    "Kimi's sections": "<|tool_calls_section_begin|>" * 10_000,
    "Kimi-K3": '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>' * 3_000,
    "Kimi-K3's ends": '<|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>'
    + "<|close|>argument<|sep|>x" * 6_000,
    "Seed": "<seed:tool_call><function=f><parameter=a>" * 4_000,
    "Python values": "<seed:tool_call><function=f><parameter=a>" + "[" * 90_000 + "'" * 90_000 + "</parameter>",
    "Hunyuan": '<tool_calls>[{"name": "f", "arguments": {' * 5_000,
    "suffixes": "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource>" * 4_000,
    "answers": "<answer>" * 20_000 + "</answer> " * 20_000,
    "responses": "<response>" * 20_000 + "</response> " * 20_000,
    "quoted line breaks": "<|tool_call_start|>[now(a='" + "\n'" * 60_000 + "<|tool_call_end|>",
    "DeepSeek": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a":' * 5_000,
    "Mistral": "[TOOL_CALLS]f[ARGS]{" * 10_000,
    "harmony": "<|channel|>commentary to=functions.f<|message|>{" * 4_000,
    "thoughts": "<tool_call></think>" * 10_000,
    "marks": "<|python_start|>[f(" * 10_000,
    "lists of no calls": "[TOOL_CALLS] [" + "1," * 100_000 + "1]",
    "lists of bad calls": "[now(" + "1),now(" * 30_000 + "1)]",
    "spaces": "[" + " " * 200_000 + "{",
    "Windows' line ends": '{"name":"now",x' + "\r\n" * 100_000,
    "functions in text": "<function=NAME>" * 13_000,
}


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_long_hostile_texts_take_linear_time(kind: str) -> None:
    for parser in PARSERS:
        started = time.process_time()
        check(parser, ADVERSARIAL[kind])
        assert time.process_time() - started < 5, parser  # quadratic ones take minutes


def test_nested_brackets_with_an_error_do_not_make_python_slow() -> None:
    for opening, closing in ("()", "[]", "{}", ("f(", ")"), ("{1:", "}"), ("[x for x in ", "]"), ("lambda:(", ")")):
        check("pythonic", f"[now(a={opening * 90}1 1{closing * 90})]")


TEMPLATES = {
    "hermes": '{{ \'<tool_call>\\n{"name": "\' }}{{ call.name }}{{ \'", "arguments": \' }}{{ call.arguments | tojson }}',
    "qwen_coder": "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}{{ '<parameter=' + name + '>\\n' }}",
    "glm": "<tool_call>{{ call.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "mistral": "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}",
    "harmony": "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary}. <|start_header_id|>',
    "pythonic": "Respond in the format [func_name1(params_name1=params_value1)] <|start_header_id|>",
    "json": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_parser_is_chosen_from_the_template(name: str) -> None:
    assert parser_for(TEMPLATES[name]) is PARSERS[name]
    several = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": TEMPLATES[name]}]
    assert parser_for(json.dumps(several)) is PARSERS[name]
    assert parser_for(json.dumps({"tool_use": TEMPLATES[name]})) is PARSERS[name]


@pytest.mark.parametrize(("template", "name"), [
    ("{%- set dsml_token = '｜DSML｜' -%}<{{ dsml_token }}invoke name=", "deepseek"),
    ("{{ '<|python_tag|>' + call.name + '.call(' }}", "llama3_json"),
    ("List of tools: <|tool_list_start|>[", "pythonic"),
    ("{{ '<|tool_call>call:' + call.name }}", "gemma"),
    ("{{ '<|tool_call|>call:' + call.name }}", "json"),
    ("", "json"),
])  # fmt: skip
def test_further_markers(template: str, name: str) -> None:
    assert parser_for(template) is PARSERS[name]


def test_importing_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, agentrl.inference.tool_parsers; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
