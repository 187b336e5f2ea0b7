"""Chat templates: missing, rewriting, probing."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.inference.tool_parsers import parser_for


def test_continuing_equals_rendering_everything_where_the_text_encodes_alike(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model)
    user, assistant = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}
    first = template.first([user])
    said = [*template.tokenizer.encode("c", add_special_tokens=False), template.eos_id]
    whole = template.first([user, assistant, user])
    assert [*first, *said, *template.following([user], answered=assistant, answer_ids=said)] == whole


def test_the_token_that_closes_a_turn_ends_it_also_where_the_model_does_not_name_it(tiny_model: Path) -> None:
    """A base model's configuration names <|endoftext|> alone: its answers ran on to the length limit (trl 7039)."""
    plain = ChatTemplate.from_folder(tiny_model)
    assert plain.stop_ids == () and plain.end_ids == {plain.eos_id}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.eos_token = "<|endoftext|>"
    template = ChatTemplate(tokenizer)
    assert template.stop_ids == (plain.eos_id,) and template.end_ids == {plain.eos_id, tokenizer.eos_token_id}
    user, assistant = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}
    said = tokenizer.encode("c", add_special_tokens=False)
    whole = template.first([user, assistant, user])
    for ended in (said, [*said, plain.eos_id]):  # at the length limit, and by itself
        added = template.following([user], answered=assistant, answer_ids=ended)
        assert [*template.first([user]), *ended, *added] == whole


def test_a_model_without_template_is_refused_with_what_to_do(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="instruct model"):
        ChatTemplate(tokenizer)


REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "a"}


def with_template(model: Path, source: str) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def test_a_template_that_drops_reasoning_of_earlier_turns_is_noticed(tiny_model: Path) -> None:
    assert not ChatTemplate.from_folder(tiny_model).rewrites([USER])
    assert with_template(tiny_model, REWRITING).rewrites([USER])


MISTRAL_V3 = (  # tools stand before the last user message, and the system message in it if it is the last of all
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}{% endfor %}<|im_end|>"
    "{% endif %}{% endfor %}"
)


def test_tools_and_system_messages_that_move_on_are_noticed(tiny_model: Path) -> None:
    """Mistral's v3: earlier turns lose them (ggml-org/llama.cpp/pull/10572, ollama/ollama/pull/5803)."""
    template = with_template(tiny_model, MISTRAL_V3)
    result = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    assert template.rewrites([USER], tools) and not template.rewrites([result], tools)
    assert not template.rewrites([USER])
    assert template.rewrites([USER], has_system=True) and template.rewrites([result], tools, has_system=True)
    for plain in (ChatTemplate.from_folder(tiny_model), ChatTemplate.from_folder(tiny_model, source="chatml_tools")):
        assert not plain.rewrites([USER], has_system=True)


def test_a_template_that_leaves_answers_out_is_refused(tiny_model: Path) -> None:
    with pytest.raises(TemplateError, match="leaves out"):
        with_template(tiny_model, "{{ messages[0].content }}<|im_end|>")


def test_a_template_that_fails_is_named_as_the_culprit(tiny_model: Path) -> None:
    with pytest.raises(TemplateError, match=r"chat template failed.*no such thing"):
        with_template(tiny_model, "{{ raise_exception('no such thing') }}")


def test_tool_results_are_refused_where_the_template_has_no_tool_calls(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model)
    result = {"role": "tool", "tool_call_id": "x", "content": "1"}
    with pytest.raises(TemplateError, match="does not render tool calls"):
        template.following([result], answered={"role": "assistant", "content": ""}, answer_ids=())


def test_our_template_with_tools_is_taken_by_name_and_its_calls_are_read_back(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model, source="chatml_tools")
    assert parser_for(template.source).name == "hermes"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    said = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
    ]}  # fmt: skip
    results = [{"role": "tool", "tool_call_id": i, "name": "add", "content": i} for i in "ab"]
    text = template.tokenizer.decode(template.canonical([USER, said, *results, USER], tools))
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.\nYou can call these tools:\n"
        '{"name": "add", "parameters": {"type": "object", "properties": {}}}\n'
        'To call one, reply with: <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\n'
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>a</tool_response>\n<tool_response>b</tool_response><|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n"
    )
    plain = template.tokenizer.decode(template.canonical([{"role": "system", "content": "s"}, USER]))
    assert plain == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
