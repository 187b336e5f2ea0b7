"""Chat templates: missing, rewriting, probing."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentrl.inference.template import ChatTemplate, TemplateError


def test_continuing_equals_rendering_everything_where_the_text_encodes_alike(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model)
    user, assistant = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}
    first = template.first([user])
    said = [*template.tokenizer.encode("c", add_special_tokens=False), template.eos_id]
    whole = template.first([user, assistant, user])
    assert [*first, *said, *template.following([user], answered=assistant, last_id=said[-1])] == whole


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
        template.following([result], answered={"role": "assistant", "content": ""}, last_id=None)
