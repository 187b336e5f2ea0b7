# ruff: noqa: RUF001 - the wide bars are DeepSeek's own
"""Every text template that TRL ships, ours, and those of further families: conversations are continued as they render.

The templates in ``family_templates`` are written from the documented form of families that TRL has no template of.
"""

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.core.episode import Message
from agentrl.core.extras import install_hint
from agentrl.inference.backend import SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.inference.template_source import built_in_templates, training_template
from agentrl.inference.tool_parsers import PARSERS, parser_for
from tests.flat import flat_branches
from tests.inference.fakes import FakeBackend, answer
from tests.inference.parser_cases import Calls
from tests.inference.sampled_turns import assert_comes_back, rendered
from tests.inference.test_template import REWRITING

_TRL = find_spec("trl")
assert _TRL is not None and _TRL.origin is not None, (
    f"TRL's templates are this test's material: {install_hint('train')}"
)
FOLDER = Path(_TRL.origin).parent / "chat_templates"
PICTURES = {"idefics3", "llava_next", "smolvlm"}  # take lists of parts only; agentrl's messages are text
NO_TOOLS = re.compile(
    r"cohere|deepseek_r1|^gemma(3|_|$)|lfm2(_training)?$|llama3(_training)?$|phi3|qwen2_5_vl|idefics|llava|smolvlm"
)
FILES = {file.stem: file for file in FOLDER.glob("*.jinja") if file.stem.removesuffix("_training") not in PICTURES}
FILES |= built_in_templates()
FAMILIES = {file.stem: file for file in (Path(__file__).parent / "family_templates").glob("*.jinja")}
FILES |= FAMILIES
NAMES = sorted(FILES)
WITH_TOOLS = [name for name in NAMES if not NO_TOOLS.search(name)]
ONE_CALL = re.compile(r"llama3|gptoss")  # Llama's refuse a second call, gpt-oss' drop it
QUOTES_AS_THEY_ARE = re.compile(r"lfm2_2_5(_v2)?$")  # a string with a quote or a backslash in it cannot be read back
TEXT = 'Zürich "Enge", it\'s 日本 🙂\n second \\ line </p> {x} '
ARGUMENTS: dict[str, Any] = {
    "text": TEXT,
    "digits": "007",
    "word": "true",
    "empty": "",
    "count": -3,
    "share": 0.5,
    "on": True,
    "off": False,
    "none": None,
    "list": [1, "a", None, True, [TEXT]],
    "inner": {"a": {"b": ["x", 2.5, "ü"], "c": {}}, "d": False},
}
ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<turn|>",
    "</s>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
    "<|observation|>",
    "<|eos|>",
    "<seed:eos>",
    "<|end_of_msg|>",
    "<|eom|>",
    "[e~[",
    "<end_of_sentence>",
    "<|tool_response>",  # Gemma 4 stops where the results begin
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}},
        },
    }
    for name in ("add", "look_up")
]


def tools_of(template: str) -> list[dict[str, Any]]:
    """The tools that a template's prompts can have; the others refuse them."""
    return [] if NO_TOOLS.search(template) or template.startswith("deepseekv3") else TOOLS


def load(name: str) -> ChatTemplate:
    """The template on a byte tokenizer that knows the end-of-turn tokens which the template names."""
    source = FILES[name].read_text()
    ends = [end for end in ENDS if end in source] or ["<EOS>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bytewise.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=ends[0], bos_token="<BOS>")
    tokenizer.add_special_tokens({"additional_special_tokens": ends[1:]})
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, end_ids=tokenizer.convert_tokens_to_ids(ends), policy="append")


def conversation(rng: random.Random, template: str) -> list[list[Message]]:
    """What comes before each answer; answers are put between by the caller."""
    single = template.startswith("llama3")  # these take one call at a time
    turns: list[list[Message]] = [[{"role": "user", "content": "Hello, 1 + 1?"}]]
    for _ in range(3):
        if NO_TOOLS.search(template) or rng.random() < 0.4:
            turns.append([{"role": "user", "content": rng.choice(["more", "and ünïcode", "a\nb"])}])
            continue
        count = 1 if single else rng.randint(1, 3)
        names = [rng.choice(("add", "look_up")) for _ in range(count)]
        made = "functions.{}:{}" if template == "kimi_k2" else "call0000{1}"  # others are replaced
        turns.append(
            [
                {"role": "tool", "tool_call_id": made.format(tool, number), "name": tool, "content": f"result {number}"}
                for number, tool in enumerate(names)
            ]
        )
    return turns


def said_before(turn: list[Message], as_text: bool) -> Message:
    """An assistant message that a turn may follow."""
    if turn[0]["role"] != "tool":
        return {"role": "assistant", "content": "yes"}
    calls = [
        {
            "id": result["tool_call_id"],
            "type": "function",
            "function": {"name": result["name"], "arguments": '{"a": "b"}' if as_text else {"a": "b"}},
        }
        for result in turn
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_added_is_what_the_template_renders_there(name: str, seed: int) -> None:
    template, tools = load(name), tools_of(name)
    messages: list[Message] = []
    for turn in conversation(random.Random(seed), name):
        if not messages:
            messages = list(turn)
            assert template.text(template.first(messages, tools), special=True)
            continue
        answered = said_before(turn, as_text=template.call_form.text)
        added = template.following(turn, answered=answered, answer_ids=(), tools=tools)  # the end of turn is put in
        if name.startswith(
            "deepseekv3"
        ):  # it marks the results of a conversation's first calls only: compare with those
            messages = messages[:1]
        messages += [answered, *turn]
        whole = template.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, tools=tools
        )
        text = template.tokenizer.decode(added, skip_special_tokens=False)
        assert whole.endswith(text) and all(m["content"].split("\n")[0] in text for m in turn)


@pytest.mark.parametrize("name", [name for name in NAMES if NO_TOOLS.search(name)])
def test_a_template_without_tool_calls_says_so(name: str) -> None:
    turn: list[Message] = [{"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"}]
    template, said = load(name), said_before(turn, as_text=False)
    if name.startswith("lfm2"):  # lists tools, and leaves calls and results to plain text
        assert "2" in template.text(template.following(turn, answered=said, answer_ids=(), tools=TOOLS), special=True)
        return
    with pytest.raises(TemplateError, match="does not render tool"):
        template.first([{"role": "user", "content": "a"}], TOOLS)
    if name.startswith("deepseek_r1"):
        return  # results are rendered; the calls before them stand in the model's own text
    with pytest.raises(TemplateError, match="does not render tool"):
        template.following(turn, answered=said, answer_ids=(), tools=TOOLS)


def arguments_for(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with texts that the template can render."""
    if name == "minimax_m3":
        return {key: unambiguous(value) for key, value in arguments.items() if value is not None}
    if not QUOTES_AS_THEY_ARE.match(name):
        return arguments
    return json.loads(json.dumps(arguments).replace("\\\\", "/").replace('\\"', "”").replace("'", "’"))


def unambiguous(value: Any) -> Any:
    """The value without what elements do not tell apart: nothing and an empty text, a number and its text."""
    if isinstance(value, dict):
        return {key: unambiguous(part) for key, part in value.items() if not is_ambiguous(part)}
    return [unambiguous(part) for part in value if not is_ambiguous(part)] if isinstance(value, list) else value


def is_ambiguous(value: Any) -> bool:
    """Whether a value within another one, of which no schema is known, could be read as another one."""
    if value is None or (isinstance(value, dict | list) and not unambiguous(value)):
        return True
    return isinstance(value, str) and reads_as_json(value)


def reads_as_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return text.strip() in ("True", "False", "None")
    return True


def test_every_template_with_tool_calls_has_a_parser() -> None:
    assert not [name for name in WITH_TOOLS if parser_for(FILES[name].read_text()) is PARSERS["json"]]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_rendered_call_is_parsed_as_it_was_made(name: str) -> None:
    template = load(name)
    calls: Calls = [("look_up", arguments_for(name, ARGUMENTS)), ("now", {}), ("look_up", {"digits": "1"})]
    calls = calls[:1] if ONE_CALL.match(name) else calls
    assert_comes_back(template, rendered(template, calls, ENDS))
    assert_comes_back(template, rendered(template, [("now", {})], ENDS, {"content": ""}))


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_any_rendered_call_is_parsed_as_it_was_made(name: str) -> None:
    template = load(name)
    rng = random.Random(name)
    for _ in range(200):
        calls: Calls = [
            (tool, arguments_for(name, {key: any_value(rng) for key in rng.sample("abcdef", rng.randint(0, 4))}))
            for tool in rng.sample(
                ["look_up", "now", "f", "get_it", "a_b2"], 1 if ONE_CALL.match(name) else rng.randint(1, 3)
            )
        ]
        assert_comes_back(template, rendered(template, calls, ENDS))


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value; texts are made of what formats give a meaning to."""
    words = ["a", "É", " ", "\n", "日", "🙂", '"', "'", "\\", "</", ">", "{", "]", ",", ":", "=", "null", "1", "`"]
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 3:
        return "".join(rng.choice(words) for _ in range(rng.randint(0, 8)))
    if kind < 6:
        return rng.choice([None, True, False, rng.randint(-(10**12), 10**12), rng.uniform(-1e6, 1e6), 1e-9])
    values = [any_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return values if kind == 6 else {f"k{at}": value for at, value in enumerate(values)}


def test_trls_training_template_keeps_what_qwen3s_own_drops() -> None:
    own = load("qwen3")
    follow: list[Message] = [{"role": "user", "content": "more"}]
    assert own.rewrites(follow)
    tokenizer: Any = own.tokenizer
    tokenizer.chat_template = training_template(tokenizer)
    assert not ChatTemplate(tokenizer).rewrites(follow)


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "qwen3_6", "gemma4"])
async def test_a_users_message_after_tool_results_rewrites_the_turns_before_it(name: str) -> None:
    """Results alone keep the reasoning of the calls, and a user's message behind them drops it."""
    template = load(name)
    template.policy = None
    result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"}
    user: Message = {"role": "user", "content": "more"}
    assert not template.rewrites([result], TOOLS)
    assert template.rewrites([result, user], TOOLS)
    assert template.rewrites([user], TOOLS)
    call = rendered(template, [("add", {"a": "1"})], ENDS, {"content": ""}).text
    session = ChatSession(
        FakeBackend(lambda ids, params: answer([*template.encode(call), template.eos_id])),
        template,
        SessionSettings(SamplingParams(max_new_tokens=900), 100_000, locked=True, model="m"),
    )
    said = (await session.create(messages=[user], tools=TOOLS)).choices[0].message
    made = said.tool_calls[0].id
    with pytest.raises(TemplateError, match=r"inference\.history"):
        await session.create(messages=[user, said, {**result, "tool_call_id": made}, user], tools=TOOLS)


def test_a_template_that_trl_does_not_know_is_refused() -> None:
    tokenizer: Any = load("qwen3").tokenizer
    tokenizer.chat_template = REWRITING
    with pytest.raises(TemplateError, match=r"model\.chat_template=training"):
        training_template(tokenizer)


@pytest.mark.parametrize("name", NAMES)
async def test_ids_only_grow_and_exactly_the_sampled_ones_are_trained(name: str) -> None:
    template = load(name)
    rng = random.Random(name)
    replies: list[list[int]] = []

    def script(ids: list[int], params: SamplingParams) -> Any:
        closed = rng.random() < 0.7
        reply = [*template.tokenizer.encode("no it is", add_special_tokens=False)][: rng.randint(0, 8)]
        replies.append([*reply, template.eos_id] if closed else reply or [5])
        return answer(replies[-1], finish="stop" if closed else "length")

    backend = FakeBackend(script)
    settings = SessionSettings(SamplingParams(max_new_tokens=20), 1_000_000, locked=True, model="m")
    session = ChatSession(backend, template, settings)
    messages: list[Any] = []
    for turn in ("one", "two", "three", "four"):
        messages.append({"role": "user", "content": turn})
        reply = await session.create(messages=messages)
        messages.append(reply.choices[0].message)
    for (before, _), sampled, (after, _) in zip(backend.requests, replies, backend.requests[1:], strict=False):
        assert after[: len(before) + len(sampled)] == before + sampled
    (flat,) = flat_branches(session.trajectory)
    trained = [token for token, mask in zip(flat.token_ids, flat.loss_mask, strict=True) if mask]
    assert trained == [token for reply in replies for token in reply]
