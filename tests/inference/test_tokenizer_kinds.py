"""A conversation that is encoded turn by turn has the ids of the whole, under every kind of tokenizer."""

import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.episode import Message
from agentrl.inference.drift import measure
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.inference.template_source import built_in_templates
from agentrl.supervised.examples import Sample
from agentrl.supervised.tokens import Encoder
from tests.inference.test_template_zoo import FILES, NAMES
from tests.inference.tokenizer_kinds import KINDS, ODD
from tests.tiny import CHATML

_TRL = find_spec("trl")
assert _TRL is not None and _TRL.origin is not None, "TRL's templates are this test's material: install agentrl[train]"
TRL = Path(_TRL.origin).parent / "chat_templates"

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SOURCES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "chatml_tools": built_in_templates()["chatml_tools"].read_text(),
} | {
    name: (TRL / f"{name}.jinja").read_text()
    for name in ("phi3", "qwen2_5", "qwen3_instruct_2507", "gemma", "llama3_1", "cohere2", "glm4moe", "deepseekv3")
}
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "chatml_tools": ["<|im_start|>", "<|im_end|>"],
    "qwen2_5": ["<|im_start|>", "<|im_end|>"],
    "qwen3_instruct_2507": ["<|im_start|>", "<|im_end|>"],
    "phi3": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "zephyr": ["<|system|>", "<|user|>", "<|assistant|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "llama3_1": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "cohere2": ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
    "glm4moe": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "deepseekv3": ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],  # noqa: RUF001 - its own wide bars
}
TOOLS_OF = {"chatml_tools", "qwen2_5", "qwen3_instruct_2507", "glm4moe"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}},
}
TEXTS = (
    *("yes", "the user\nsays more", " 12 ", "\n", "\n\nthe\n\n", "", ". yes", "12", "日本 é", "ﬁ ① x²"),
    *("  two  spaces  ", "a\tb\r\n", "[INST]", "e\u0301", "-1", "</b>", "he:\n", "\u00a0x\u00a0"),
)


def load(kind: str, source: str) -> ChatTemplate:
    build = (KINDS | ODD)[kind]
    tokenizer = build(SPECIAL.get(source, []))
    tokenizer.chat_template = SOURCES[source]
    return ChatTemplate(tokenizer, policy="append")


def conversation(rng: random.Random, tools: bool) -> list[Message]:
    """A user's message, then answers with what follows each: a user's message or a tool's result."""
    messages: list[Message] = [{"role": "user", "content": rng.choice(TEXTS)}]
    for number in range(4):
        if tools and rng.random() < 0.5:
            call = {"name": "f", "arguments": {"a": rng.choice(TEXTS)}}
            calls = [{"id": f"call0000{number}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            result = {"role": "tool", "name": "f", "tool_call_id": f"call0000{number}"}
            messages.append({**result, "content": rng.choice(TEXTS)})
        else:
            messages.append({"role": "assistant", "content": rng.choice(TEXTS)})
            messages.append({"role": "user", "content": rng.choice(TEXTS)})
    return messages


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_turn_by_turn_gives_the_ids_of_the_whole(kind: str, source: str) -> None:
    template = load(kind, source)
    tools = [TOOL] if source in TOOLS_OF else []
    kept = turns = 0
    for seed in range(3):
        messages = conversation(random.Random(f"{kind}{source}{seed}"), bool(tools))
        stored = template.first(messages[:1], tools)
        prompt = template.render(messages[:1], generation=True, tools=tools)
        for place in range(1, len(messages), 2):
            said, follow = messages[place], messages[place + 1 : place + 2]
            text = template.render(messages[: place + 2], generation=True, tools=tools)
            whole = list(template.tokenizer.encode(text, add_special_tokens=False))
            added = template.following(follow, answered=said, answer_ids=[closing(template, said)], tools=tools)
            end = len(whole) - len(added)
            assert whole[end:] == added and whole[end - 1] in template.end_ids
            turns += text.startswith(prompt)  # not under a template that renders earlier turns in another way
            if whole[: len(stored)] == stored:  # not where a token joins the prompt and this answer
                kept += 1
                answer = whole[len(stored) : end]
                again = template.following(follow, answered=said, answer_ids=answer, tools=tools)
                assert [*stored, *answer, *again] == whole
            stored, prompt = whole, text
    told = any("joins" in note for note in template.notes)
    assert told or kept >= 0.6 * turns


def closing(template: ChatTemplate, said: Message) -> int:
    ends = template.turn_ends
    end = ends.calling if said.get("tool_calls") else ends.closing
    assert end is not None
    return end


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_warning_where_pieces_and_whole_are_alike(kind: str, source: str) -> None:
    assert not [note for note in load(kind, source).notes if "where a conversation goes on" in note]


@pytest.mark.parametrize("kind", ODD)
def test_a_special_token_that_is_no_token_inside_a_text_is_told_with_its_flag(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = load(kind, "chatml")
    (note,) = [note for note in template.notes if "where a conversation goes on" in note]
    assert re.search(r"does not read '<\|im_end\|>' \((single_word|normalized)\).* \d+ of each turn's ids differ", note)
    assert [record.getMessage() for record in caplog.records] == list(template.notes), "each is told once"
    added = template.following(USERS, answered=SAYS, answer_ids=[closing(template, SAYS)])
    assert template.tokenizer.decode(added).strip().endswith("assistant"), "and it can be used"


USERS: list[Message] = [{"role": "user", "content": "the user"}]
SAYS: Message = {"role": "assistant", "content": "yes"}


def test_a_missing_first_token_is_told() -> None:
    """Gemma without its <bos> answers nonsense."""
    assert "begins each text with '<s>'" in "".join(load("bytes with bos", "chatml").notes)
    for kind, source in (("bytes with bos", "mistral"), ("bytes", "chatml")):
        assert not load(kind, source).notes


def test_a_prompt_that_the_tokenizer_joins_with_the_answer_is_told() -> None:
    """GPT-2 splits two line breaks before a word, and Llama 3's template ends its generation prompt in two."""
    (note,) = load("bytes", "llama3_1").notes
    assert "joins its end with the answer's beginning: in each turn 1 of the ids" in note
    assert not load("bytes across lines", "llama3_1").notes


def test_phi3s_line_breaks_are_taken_in_by_its_tokens() -> None:
    """They were stored once more after each answer."""
    template = load("bytes, rstrip", "phi3")
    end = closing(template, SAYS)
    added = template.following(USERS, answered=SAYS, answer_ids=[end])
    tokenizer: Any = template.tokenizer
    known = tokenizer.convert_ids_to_tokens(added)
    assert known[:1] == ["<|user|>"] and known[-2:] == ["<|end|>", "<|assistant|>"]


def test_drift_counts_an_id_too_many_beside_a_special_token() -> None:
    template = load("bytes, rstrip", "phi3")
    said, end = template.encode("yes"), closing(template, SAYS)
    first, last = template.first(USERS), [*template.encode("yes"), end]
    whole = [*USERS, SAYS, *USERS, SAYS]
    added = template.following(USERS, answered=SAYS, answer_ids=[*said, end])
    for between, expected in ((added, False), ([*template.encode("\n"), *added], True)):
        ids = [*first, *said, end, *between, *last]
        sampled = [False] * len(first) + [True] * (len(said) + 1) + [False] * len(between) + [True] * len(last)
        assert measure(template, ids, whole, (), sampled).special is expected


def test_limits_and_padding_that_a_tokenizer_was_saved_with_change_no_prompt() -> None:
    """They are in many a tokenizer.json; a prompt of 8 tokens was sent instead of the conversation."""
    limited, free = load("bytes, limited", "chatml"), load("bytes", "chatml")
    long: list[Message] = [{"role": "user", "content": "the user says more " * 9}]
    assert limited.first(long) == free.first(long) and len(limited.first(long)) > 32
    assert limited.first(USERS) == free.first(USERS)


def test_a_tokenizer_that_splits_special_tokens_is_refused() -> None:
    tokenizer = KINDS["bytes"](SPECIAL["chatml"])
    tokenizer.chat_template, tokenizer.split_special_tokens = CHATML, True
    with pytest.raises(TemplateError, match="split_special_tokens"):
        ChatTemplate(tokenizer)


MARKS = re.compile(
    r"<\|[A-Za-z_]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[[A-Z_/]{5,}\]|"  # noqa: RUF001
    r"<(?:start|end|beginning)_of_(?:turn|sentence)>|<seed:[a-z]+>|\[e~\[|\]~b\]"
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["bytes, both strips", "metaspace first", "Python, rstrip"])
def test_every_template_of_trl_goes_on_with_the_ids_of_the_whole(kind: str, name: str) -> None:
    source = FILES[name].read_text()
    tokenizer = KINDS[kind](sorted(set(MARKS.findall(source))))
    tokenizer.chat_template = source
    template = ChatTemplate(tokenizer, policy="append")
    end = closing(template, SAYS)
    follow: Message = {"role": "user", "content": "\nsays more "}
    added = template.following([follow], answered=SAYS, answer_ids=[end])
    whole = template.encode(template.render([*USERS, SAYS, follow], generation=True))
    assert whole[len(whole) - len(added) :] == added
    if template.turn_ends.closes and not name.startswith("gptoss"):  # ends an earlier turn with another token
        assert whole[len(whole) - len(added) - 1] == end
    assert not [note for note in template.notes if "where a conversation goes on" in note]


@pytest.mark.parametrize("source", ["chatml", "llama2", "mistral", "zephyr", "phi3", "gemma"])
@pytest.mark.parametrize("kind", KINDS)
def test_supervised_examples_have_the_ids_of_a_session(kind: str, source: str) -> None:
    template = load(kind, source)
    said: Message = {"role": "assistant", "content": "yes"}
    encoded = Encoder(template).sample(Sample([*USERS, said, *USERS, said], 0), completion_only=True)
    whole = template.render([*USERS, said], generation=False)
    prompt = template.render(USERS, generation=True)
    answer = template.encode_after(prompt, whole[len(prompt) :].removesuffix(template.turn_ends.rest))
    added = template.following(USERS, answered=said, answer_ids=answer)
    assert encoded.ids == [*template.first(USERS), *answer, *added, *answer]


@pytest.mark.long
def test_the_shipped_models_tokenizer_gives_the_same_ids_in_pieces_as_in_one() -> None:
    from agentrl.data.models import resolve_model

    template = ChatTemplate.from_folder(resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct").path)
    assert template.notes == () and template.stop_ids == () and template.stop_texts == ()
    for seed in range(20):
        messages = conversation(random.Random(seed), tools=False)
        stored = template.first(messages[:1])
        for place in range(1, len(messages), 2):
            said, follow = messages[place], messages[place + 1 : place + 2]
            text = template.render(messages[: place + 2], generation=True)
            whole = template.encode(text)
            added = template.following(follow, answered=said, answer_ids=[template.eos_id])
            end = len(whole) - len(added)
            assert whole[end - 1 :] == [template.eos_id, *added]
            if not said["content"][:1].isspace():
                assert whole[: len(stored)] == stored
            stored = whole
