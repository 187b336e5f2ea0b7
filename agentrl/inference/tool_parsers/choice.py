# ruff: noqa: RUF001 - the wide bars are DeepSeek's own
"""Chooses the tool-call format by the markers in a model's chat template.

Guarantees: formats that share tags are distinguished; a template without a known marker gets the JSON fallback.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from agentrl.inference.tool_parsers.answer import FormatParser, ToolParser
from agentrl.inference.tool_parsers.bare_json import find_json, find_llama
from agentrl.inference.tool_parsers.cohere import find_cohere
from agentrl.inference.tool_parsers.deepseek import find_deepseek
from agentrl.inference.tool_parsers.ernie import find_ernie
from agentrl.inference.tool_parsers.gemma import find_gemma
from agentrl.inference.tool_parsers.harmony import HarmonyParser
from agentrl.inference.tool_parsers.hermes import find_hermes
from agentrl.inference.tool_parsers.hunyuan import HUNYUAN_V3, find_hunyuan, suffix_in
from agentrl.inference.tool_parsers.json_blocks import GRANITE, MINIMAX_M1, PHI4_MINI
from agentrl.inference.tool_parsers.kimi import KIMI
from agentrl.inference.tool_parsers.kimi_k3 import find_kimi_k3
from agentrl.inference.tool_parsers.markup import GLM, QWEN_CODER
from agentrl.inference.tool_parsers.minimax import MINIMAX_M2
from agentrl.inference.tool_parsers.minimax_m3 import find_minimax_m3
from agentrl.inference.tool_parsers.mistral import find_mistral
from agentrl.inference.tool_parsers.muse import MuseParser
from agentrl.inference.tool_parsers.pythonic import find_pythonic
from agentrl.inference.tool_parsers.seed import SEED

_ALL: tuple[ToolParser, ...] = (
    FormatParser("hermes", find_hermes),
    FormatParser("llama3_json", find_llama),
    FormatParser("mistral", find_mistral, thinking=("[THINK]", "[/THINK]")),
    FormatParser("deepseek", find_deepseek),
    FormatParser("qwen_coder", QWEN_CODER.find),
    HarmonyParser(),
    FormatParser("gemma", find_gemma, thinking=("<|channel>thought", "<channel|>")),
    FormatParser("granite", GRANITE.find),
    FormatParser("phi4_mini", PHI4_MINI.find),
    FormatParser("minimax_m1", MINIMAX_M1.find),
    FormatParser("minimax_m2", MINIMAX_M2.find),
    FormatParser("minimax_m3", find_minimax_m3, thinking=("<mm:think>", "</mm:think>")),
    MuseParser(),
    FormatParser("glm", GLM.find),
    FormatParser("kimi", KIMI.find),
    FormatParser("kimi_k3", find_kimi_k3, thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    FormatParser("seed", SEED.find, thinking=("<seed:think>", "</seed:think>")),
    FormatParser("ernie", find_ernie),
    FormatParser("hunyuan", find_hunyuan),
    FormatParser("hunyuan_v3", HUNYUAN_V3.find),
    FormatParser("hunyuan_v3_opensource", HUNYUAN_V3.find, thinking=("<think:opensource>", "</think:opensource>")),
    FormatParser("hunyuan_v4", HUNYUAN_V3.find, thinking=("<think:6124c78e>", "</think:6124c78e>")),  # Hy4-preview's
    FormatParser("cohere", find_cohere, thinking=("<|START_THINKING|>", "<|END_THINKING|>")),
    FormatParser("pythonic", find_pythonic),
    FormatParser("json", find_json),
)
PARSERS: Mapping[str, ToolParser] = MappingProxyType({parser.name: parser for parser in _ALL})

# The first row decides whose markers are all in the template, so of formats that share tags the more specific is first.
_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("cohere", ("<|START_ACTION|>",)),
    ("cohere", ("<|START_THINKING|>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("deepseek", ("｜DSML｜",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("kimi", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    ("kimi_k3", ("<|open|>", "<|sep|>", "argument")),
    ("seed", ("<seed:tool_call>", "<function=", "<parameter=")),
    ("hunyuan_v3_opensource", ("tool_sep", "arg_key", ":opensource")),
    ("hunyuan_v3", ("tool_sep", "arg_key")),
    ("hunyuan_v4", ("<tool_calls{}>", "<arg_key{}>")),
    ("hunyuan_v4", ("<tool_calls:", "<arg_key:")),
    ("hunyuan", ("<tool_calls>", "<tool_response>", "<|extra_0|>")),
    ("ernie", ("<tool_call>", "<response>")),
    ("muse", ("<atem:invoke", "<|message|>")),
    ("gemma", ("<|tool_call>", "call:")),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke")),
    ("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    ("hermes", ("<|start_of_role|>", "</tool_call>")),  # Granite 4
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("granite", ("<|start_of_role|>", "available_tools")),
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),
    ("phi4_mini", ("functools[",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("make calls in a single JSON array",)),  # xLAM
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": ', '"parameters": ', "<|start_header_id|>")),
    ("llama3_json", ('{"name": ', '"parameters": ', "<|header_start|>")),
)


_SUFFIXED = ("hunyuan_v3", "hunyuan_v4")
FALLBACK = "json"  # format of a template without a known marker


@lru_cache(maxsize=64)
def parser_for(chat_template: str) -> ToolParser:
    """Returns the parser for a chat template's format of tool calls.

    Args:
        chat_template: The template's Jinja text, or JSON that holds several templates, if the tokenizer has several.

    Returns:
        The parser; :data:`FALLBACK` if the template has no known marker.
    """
    source = _source(chat_template)
    for name, markers in _MARKERS:
        if all(marker in source for marker in markers):
            return _with_suffix(name, source) if name in _SUFFIXED else PARSERS[name]
    return PARSERS[FALLBACK]


def _with_suffix(name: str, source: str) -> ToolParser:
    """Returns Hunyuan's parser with the thinking tags of the template: weights differ in the suffix of all tags."""
    suffix = suffix_in(source)
    return FormatParser(name, HUNYUAN_V3.find, thinking=(f"<think{suffix}>", f"</think{suffix}>"))


def _source(chat_template: str) -> str:
    if not chat_template.lstrip().startswith(("[", "{")):
        return chat_template
    try:
        return "\n".join(_texts(json.loads(chat_template)))
    except (ValueError, RecursionError):
        return chat_template


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]
