"""What is given to a chat template is in the prompt, or the prompt is refused: every template of the zoo."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.core.episode import Message
from agentrl.inference.backend import SamplingParams
from agentrl.inference.prompt_check import PromptCheck
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.inference.tool_parsers import PARSERS, parser_for
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_template_zoo import NAMES, TOOLS, load

USER: Message = {"role": "user", "content": "question"}


def call(arguments: str = '{"a": "value"}') -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": arguments}}


RESULT: Message = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "result"}
PROMPTS: dict[str, list[Message]] = {
    "user": [USER],
    "system": [{"role": "system", "content": "rules"}, USER],
    "developer": [{"role": "developer", "content": "rules"}, USER],
    "both": [{"role": "system", "content": "rules"}, {"role": "developer", "content": "law"}, USER],
    "late system": [USER, {"role": "system", "content": "rules"}, USER],
    "late developer": [USER, {"role": "assistant", "content": "yes"}, {"role": "developer", "content": "law"}, USER],
    "two users": [USER, {"role": "user", "content": "second"}],
    "an example": [USER, {"role": "assistant", "content": "yes"}, USER],
    "a call": [USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, RESULT],
    "a call without arguments": [USER, {"role": "assistant", "content": "", "tool_calls": [call("{}")]}, RESULT],
    "two results": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call(), {**call(), "id": "call00001"}]},
        RESULT,
        {**RESULT, "tool_call_id": "call00001", "content": "other"},
    ],
    "a result alone": [USER, RESULT],
}


def given(messages: list[Message], tools: list[dict[str, Any]]) -> set[str]:
    """The words that a prompt must hold."""
    words = {message["content"] for message in messages if message["content"]}
    for message in messages:
        for one in message.get("tool_calls", ()):
            words |= {one["function"]["name"], *json.loads(one["function"]["arguments"]).values()}
    return words | {tool["function"]["name"] for tool in tools}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_was_given_is_missing_or_it_is_refused(name: str) -> None:
    template = load(name)
    taken = 0
    for messages, tools in itertools.product(PROMPTS.values(), ([], TOOLS)):
        try:
            text = template.text(template.first(messages, tools), special=True)
        except TemplateError as error:
            assert "chat template" in str(error)
            continue
        taken += 1
        assert all(word in text for word in given(messages, tools)), (messages, tools, text)
    assert taken >= 2, "at least a question and an example are taken"


@pytest.mark.parametrize("name", NAMES)
def test_the_same_holds_for_what_follows_an_answer(name: str) -> None:
    template = load(name)
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call()]}
    for turn in (
        [USER],
        [{"role": "system", "content": "rules"}, USER],
        [{"role": "developer", "content": "law"}, USER],
    ):
        try:
            added = template.text(template.following(turn, answered={**said}, answer_ids=()), special=True)
        except TemplateError:
            continue
        assert all(message["content"] in added for message in turn), (turn, added)


TAKEN = {  # what the families do with a developer message at the beginning and with tools
    "qwen2_5": (True, True), "qwen3": (True, True), "glm4moe": (True, True), "gptoss": (True, True),
    "llama3_1": (True, True), "deepseekv3": (True, False), "llama3": (True, False), "phi3": (True, False),
    "gemma": (False, False), "cohere": (True, False), "deepseek_r1_distill": (True, False),
    "chatml_tools": (True, True),
}  # fmt: skip


@pytest.mark.parametrize(("name", "takes"), TAKEN.items())
def test_developer_messages_and_tools_of_the_families(name: str, takes: tuple[bool, bool]) -> None:
    template = load(name)
    for messages, tools, taken in ((PROMPTS["developer"], [], takes[0]), ([USER], TOOLS, takes[1])):
        if taken:
            assert template.first(messages, tools)
        else:
            with pytest.raises(TemplateError, match=r"model\.chat_template"):
                template.first(messages, tools)


def test_a_developer_message_keeps_its_role_where_the_template_knows_it() -> None:
    known = load("chatml_tools")  # renders any role
    assert "<|im_start|>developer\nrules" in known.text(known.first(PROMPTS["developer"]), special=True)
    mapped = load("qwen3")  # knows system, and would drop developer
    own = mapped.text(mapped.first([{"role": "system", "content": "rules"}, USER]), special=True)
    assert mapped.text(mapped.first(PROMPTS["developer"]), special=True) == own
    assert mapped.canonical(PROMPTS["developer"]) == mapped.canonical([{"role": "system", "content": "rules"}, USER])


TURN = (
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{'name': "
    "'{{ c.function.name }}', 'arguments': {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n"
)
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS_TEXT = "{% if tools %}{{ tools | tojson }}{% endif %}"
LOOKED_UP = (  # a template may look a call's tool up among the tools
    "{% for c in m.tool_calls or [] %}{% if tools and c.function.name not in tools | map(attribute='function') | "
    "map(attribute='name') | list %}{{ raise_exception('no such tool') }}{% endif %}{% endfor %}"
)
UNUSUAL = {  # templates that render all, in ways of their own: where the tools are, around each message
    "each text in capitals": ("", "{% if m.role == 'user' %}{{ m.content | upper }}{% endif %}" + TOOLS_TEXT),
    "tools beside the system message": ("", "{% if m.role == 'system' %}" + TOOLS_TEXT + "{% endif %}"),
    "tools with the last message": (
        "",
        "{% if m.role == 'user' and loop.last or m.role == 'system' %}" + TOOLS_TEXT + "{% endif %}",
    ),
    "what the schema says": (
        "{% for t in tools or [] %}{{ t.function.name }} {{ t.function.parameters.properties.a.type }}{% endfor %}",
        "",
    ),
    "a call's tool": (TOOLS_TEXT, LOOKED_UP),
    "what a result says": (
        TOOLS_TEXT,
        "{% if m.role == 'tool' and m.content.startswith('result') %}{{ m.content }}{% endif %}",
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_an_unusual_template_renders_is_not_refused(name: str) -> None:
    before, around = UNUSUAL[name]
    tokenizer: Any = load("chatml_tools").tokenizer
    own = next((role for role in ("user", "tool") if f"m.role == '{role}'" in around and "m.content" in around), "")
    turn = TURN.replace(
        "{{ m.content }}", f"{{{{ m.content if m.role != '{own}' }}}}"
    )  # ``around`` has that of this role
    tokenizer.chat_template = f"{before}{{% for m in messages %}}{around}{turn}{{% endfor %}}{OPENING}"
    template = ChatTemplate(tokenizer, policy="append")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    system: Message = {"role": "system", "content": "rules"}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [call()]}
    text = template.text(template.first([system, USER, calling, RESULT], tools), special=True).lower()
    assert all(word in text for word in ("rules", "question", "add", "value", "result"))
    for new, answered in (([RESULT], calling), ([USER], {"role": "assistant", "content": "yes"})):
        assert template.following(new, answered=answered, answer_ids=[template.eos_id], tools=tools)


def test_a_tools_name_inside_of_an_id_by_chance_is_no_name() -> None:
    """Mistral's templates refuse ids that have not nine letters and digits, and ``add`` may occur in them."""
    template = load("chatml_tools")
    tokenizer: Any = template.tokenizer
    checks = (
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = f"{TOOLS_TEXT}{{% for m in messages %}}{checks}{TURN}{{% endfor %}}{OPENING}"
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [{**call(), "id": "1addf0b22"}]}
    assert ChatTemplate(tokenizer).first([USER, calling, {**RESULT, "tool_call_id": "1addf0b22"}], TOOLS)


def test_a_long_conversation_is_refused_in_a_short_sentence() -> None:
    turns = [USER, {"role": "assistant", "content": "yes"}] * 50
    with pytest.raises(TemplateError, match=r"user, assistant, .*\(102 messages\)") as caught:
        load("phi3").first([*turns, USER, RESULT])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["gptoss", "gemma"])
def test_a_refusal_says_that_messages_come_after_an_answer(name: str) -> None:
    """``a prompt of the roles system, user`` is what the remedy asks for."""
    template = load(name)
    with pytest.raises(TemplateError, match=r"messages of the roles system, user after an answer"):
        template.following(
            [{"role": "system", "content": "rules"}, USER],
            answered={"role": "assistant", "content": "yes"},
            answer_ids=[template.eos_id],
        )


def test_a_call_is_read_back_where_its_result_must_follow() -> None:
    tokenizer: Any = load("chatml_tools").tokenizer
    last = "{% if m.tool_calls and loop.last %}{{ raise_exception('a result must follow') }}{% endif %}"
    calls = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    turn = f"{last}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{calls}<|im_end|>"
    tokenizer.chat_template = f"{TOOLS_TEXT}{{% for m in messages %}}{turn}{{% endfor %}}{OPENING}"
    ChatTemplate(tokenizer).prompts.check_calls(PARSERS["json"])


@pytest.mark.parametrize("name", NAMES)
def test_findings_say_what_happens_in_a_conversation(name: str) -> None:
    """DeepSeek's template puts every system message first, where a conversation that goes on cannot have it."""
    template, late = load(name), [{"role": "system", "content": "rules"}, USER]
    try:
        template.following(late, answered={"role": "assistant", "content": "yes"}, answer_ids=[template.eos_id])
        taken = True
    except TemplateError:
        taken = False
    lines = template.findings(parser_for(template.source))
    assert ("late system message" in lines[0]) == taken, lines


def session(template: ChatTemplate, parser: str | None = None) -> ChatSession:
    backend = FakeBackend(lambda ids, params: answer([template.eos_id]))
    chosen = PARSERS[parser] if parser else None
    return ChatSession(
        backend,
        template,
        SessionSettings(SamplingParams(max_new_tokens=9), 100_000, locked=True, model="m", parser=chosen),
    )


async def test_tools_under_a_template_without_them_are_refused_with_the_remedy(tiny_model: Path) -> None:
    """SmolLM2's own template with Calculator-v0: the prompt said "use the calculate tool", and no tool was in it."""
    with pytest.raises(TemplateError, match=r"does not render tools.*model\.chat_template=chatml_tools"):
        await session(ChatTemplate.from_folder(tiny_model)).create(messages=[USER], tools=TOOLS)
    with_tools = ChatTemplate.from_folder(tiny_model, source="chatml_tools")
    assert await session(with_tools).create(messages=[USER], tools=TOOLS)


async def test_calls_that_the_parser_does_not_read_back_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    template = load("qwen3")
    calls = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {% endfor %}"
    )
    tokenizer: Any = template.tokenizer
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}" + calls + "<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}Answer: {% endif %}"
    )
    odd = ChatTemplate(tokenizer, policy="append")
    with pytest.raises(TemplateError, match=r"parser json reads .*CALL look_up.* as no call.*inference\.tool_parser"):
        await session(odd).create(messages=[USER], tools=TOOLS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the recipe's own choice is taken, and the difference told once
            assert await session(odd, "hermes").create(messages=[USER], tools=TOOLS)
    assert [record.getMessage()[:34] for record in caplog.records] == ["inference.tool_parser=hermes: the "]


async def test_a_template_that_renders_tools_but_no_calls_is_refused(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + str(tokenizer.chat_template)
    with pytest.raises(TemplateError, match="renders no tool calls"):
        await session(ChatTemplate(tokenizer)).create(messages=[USER], tools=TOOLS)


def test_a_call_whose_arguments_are_no_object_spoils_no_later_prompt() -> None:
    template = load("gptoss")
    broken = [USER, {"role": "assistant", "content": "", "tool_calls": [call("{broken")]}, RESULT]
    try:
        template.first(broken, TOOLS)
    except TemplateError as error:
        assert "not a JSON object" in str(error)
    assert template.first(PROMPTS["a call without arguments"], TOOLS)


def test_names_and_words_beside_a_call_that_are_left_out_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    template = load("llama3_1")
    named = [{**USER, "name": "Ann"}]
    aside = [USER, {"role": "assistant", "content": "let me see", "tool_calls": [call()]}, RESULT]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            template.first(named)
            template.first([*named, {"role": "assistant", "content": "yes"}, *named])
            template.first(aside, TOOLS)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "the name of user messages" in told[0] and "beside a tool call" in told[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_parser_of_a_template_reads_its_calls_or_it_is_refused(name: str) -> None:
    template = load(name)
    try:
        template.first([USER], TOOLS)
    except TemplateError:
        return  # no tools, no calls
    template.prompts.check_calls(parser_for(template.source))


async def test_the_models_own_ids_of_calls_are_kept() -> None:
    """Kimi's template writes the id in place of the name, and its results name it."""
    template = load("kimi_k2")
    call_text = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    texts = [call_text.format(0) + call_text.format(1), call_text.format(0) * 2]
    for text, kept in zip(texts, (["functions.add:0", "functions.add:1"], None), strict=True):
        ids = template.encode(text)
        backend = FakeBackend(lambda prompt, params, ids=ids: answer([*ids, template.eos_id]))
        settings = SessionSettings(SamplingParams(max_new_tokens=900), 100_000, locked=True, model="m")
        chat = ChatSession(backend, template, settings)
        said = (await chat.create(messages=[USER], tools=TOOLS)).choices[0].message
        found = [one.id for one in said.tool_calls]
        assert found == kept if kept else len(set(found)) == 2, "ids that the model repeats are replaced"
        results = [{"role": "tool", "tool_call_id": one, "name": "add", "content": "7"} for one in found]
        await chat.create(messages=[USER, said, *results], tools=TOOLS)
        told = kept or ["functions.add:0", "functions.add:1"]  # a replaced id stays out of the prompt
        assert all(f"Return of {one}" in template.text(backend.requests[-1][0], special=True) for one in told)
    own_name = {**call(), "id": "functions.add:0"}
    example = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [own_name]},
        {**RESULT, "tool_call_id": "functions.add:0"},
    ]
    assert "functions.add:0" in template.text(template.first(example, TOOLS), special=True)


EXAMPLE = "a call and its result as an example"
FOUND = {
    "qwen3": [
        f"rendered: system message, developer message (as system), late system message, tools, {EXAMPLE}",
        "tool calls: read back by the parser hermes",
    ],
    "chatml_tools": [
        f"rendered: system message, developer message, late system message, tools, {EXAMPLE}",
        "tool calls: read back by the parser hermes",
    ],
    "gemma": [
        *(f"refused: {what}: this chat template" for what in ("system message", "developer message")),
        *(f"refused: {what}: this chat template" for what in ("late system message", "tools", EXAMPLE)),
        "tool calls: this chat template renders no tool calls",
        "remedy: use roles that the template renders there",
        "remedy: set model.chat_template=chatml_tools",
    ],
    "qwen3_5_think": [
        f"rendered: system message, developer message (as system), tools, {EXAMPLE}",
        "refused: late system message: this chat template",
        "tool calls: read back by the parser qwen_coder",
        "remedy: use roles that the template renders there",
    ],
    "llama3": [
        "rendered: system message, developer message, late system message",
        "refused: tools: this chat template does not render tools",
        f"refused: {EXAMPLE}: this chat template leaves out a tool call",
        "tool calls: this chat template renders no tool calls",
        "remedy: set model.chat_template=chatml_tools",
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_template_does_is_said_in_words(name: str) -> None:
    template = load(name)
    lines = template.findings(parser_for(template.source))
    assert [line[: len(want)] for line, want in zip(lines, FOUND[name], strict=True)] == FOUND[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ernie_4_5", "<think>\nhm\n</think>\n\n<response>\n7\n</response>"),
        ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\n7\n</answer>"),
    ],
)
async def test_marks_around_an_answer_are_no_content_without_tools_either(name: str, text: str) -> None:
    template = load(name)
    settings = SessionSettings(SamplingParams(max_new_tokens=900), 100_000, locked=True, model="m")
    backend = FakeBackend(lambda ids, params: answer([*template.encode(text), template.eos_id]))
    message = (await ChatSession(backend, template, settings).create(messages=[USER])).choices[0].message
    assert (message.content, message.reasoning_content) == ("7", "hm")


def test_the_forms_that_are_remembered_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversation of a dataset has a form of its own, and a long one has a long description."""
    monkeypatch.setattr("agentrl.inference.prompt_check.FORMS", 5)
    rendered: list[int] = []

    def render(messages: Any, tools: Any, generation: bool) -> str:
        rendered.append(len(messages))
        return "".join(message["content"] for message in messages)

    check = PromptCheck(render, str)
    for size in (*range(1, 10), 9, 8, 5, 1):
        check.check([USER] * size, [])
    assert rendered == [*range(1, 10), 1], "the newest forms are tried once"
    assert len(check._failures) == 5 and max(map(len, check._failures)) <= 32


def test_a_template_that_looks_texts_up_is_tried_with_each_prompt() -> None:
    """What one text showed of a form was taken for all texts of this form."""
    tokenizer: Any = load("qwen3").tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'user' or m.content.startswith('Q:') %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(tokenizer, policy="append")
    for text, taken in (("Q: one", True), ("two", False), ("Q: three", True), ("two", False)):
        if taken:
            assert text in template.text(template.first([{"role": "user", "content": text}]), special=True)
        else:
            with pytest.raises(TemplateError, match="leaves out the content of the user message"):
                template.first([{"role": "user", "content": text}])
