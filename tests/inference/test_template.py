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
    assert [*first, *said, *template.following([user], turn_closed=True)] == whole


def test_a_model_without_template_is_refused_with_what_to_do(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="instruct model"):
        ChatTemplate(tokenizer)


def test_a_template_that_rewrites_history_cannot_be_continued(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate(tokenizer)
    template.first([{"role": "user", "content": "a"}])
    with pytest.raises(TemplateError, match="rewrites earlier turns"):
        template.following([{"role": "user", "content": "a"}], turn_closed=True)
