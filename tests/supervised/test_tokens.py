from pathlib import Path
from typing import Any

import pytest

from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.supervised.examples import Pair, Sample, sample_of
from agentrl.supervised.tokens import Encoder

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the\nuser"},
    {"role": "assistant", "content": "one\n\n"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": " two, ä"},
]


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def spoken(template: ChatTemplate, ids: list[int], learned: list[bool]) -> list[str]:
    """The runs of learned tokens as text."""
    runs: list[list[int]] = []
    for place, (token, is_learned) in enumerate(zip(ids, learned, strict=True)):
        if is_learned:
            if place == 0 or not learned[place - 1]:
                runs.append([])
            runs[-1].append(token)
    return [template.tokenizer.decode(run) for run in runs]


def test_the_words_and_the_end_of_turn_are_learned_and_nothing_else(template: ChatTemplate):
    encoded = Encoder(template).sample(Sample(TALK, 4))
    assert spoken(template, encoded.ids, encoded.learned) == [" two, ä<|im_end|>"]
    assert encoded.learned[-1] and encoded.ids[-1] == template.eos_id
    prompt = template.first(TALK[:4])
    assert encoded.ids[: len(prompt)] == prompt, "the ids that a session sends"
    assert encoded.labels == [-100] * len(prompt) + encoded.ids[len(prompt) :]


def test_every_assistant_turn_of_messages_is_learned(template: ChatTemplate):
    encoded = Encoder(template).sample(Sample(TALK, 0))
    assert spoken(template, encoded.ids, encoded.learned) == ["one\n\n<|im_end|>", " two, ä<|im_end|>"]
    assert template.tokenizer.decode(encoded.ids) + "\n" == template.tokenizer.decode(template.canonical(TALK))


def test_what_follows_the_last_assistant_turn_is_left_out(template: ChatTemplate):
    assert Encoder(template).sample(Sample(TALK[:4], 0)) == Encoder(template).sample(Sample(TALK[:3], 0))


def test_the_whole_line_is_learned_where_the_recipe_says_so(template: ChatTemplate):
    encoded = Encoder(template).sample(Sample(TALK, 4), completion_only=False)
    assert all(encoded.learned)
    assert encoded.ids == Encoder(template).sample(Sample(TALK, 4)).ids


def test_the_mask_is_that_of_trl_without_the_line_break_behind_the_turn(
    template: ChatTemplate, tiny_model: Path, tmp_path: Path
):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", completion_only_loss=True)
    lines = Dataset.from_list([{"prompt": TALK[:4], "completion": TALK[4:]}])
    tokenizer: Any = template.tokenizer
    theirs = SFTTrainer(str(tiny_model), args, train_dataset=lines, processing_class=tokenizer).train_dataset[0]
    ours = Encoder(template).sample(Sample(TALK, 4))
    assert theirs["input_ids"][:-1] == ours.ids and tokenizer.decode(theirs["input_ids"][-1:]) == "\n"
    assert theirs["labels"][:-1] == ours.labels


def test_a_pair_shares_its_prompt(template: ChatTemplate):
    pair = Pair(TALK[:4], TALK[4], {"role": "assistant", "content": "no"})
    prompt, chosen, rejected = Encoder(template).pair(pair)
    assert prompt == template.first(TALK[:4])
    assert template.tokenizer.decode(chosen) == " two, ä<|im_end|>"
    assert template.tokenizer.decode(rejected) == "no<|im_end|>"


def test_a_template_that_forgets_earlier_turns_is_refused(tiny_model: Path, tmp_path: Path):
    forgets = tmp_path / "forgets.jinja"
    forgets.write_text(
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = Encoder(ChatTemplate.from_folder(tiny_model, source=str(forgets)))
    encoder.sample(Sample(TALK[:3], 0))
    with pytest.raises(TemplateError, match="leaves out the content of the assistant message"):
        encoder.sample(Sample(TALK, 0))
    forgets.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content | upper }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(TemplateError):
        Encoder(ChatTemplate.from_folder(tiny_model, source=str(forgets))).sample(Sample(TALK, 0))
    forgets.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}(now) {% endif %}{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(TemplateError, match="renders earlier turns differently"):
        Encoder(ChatTemplate.from_folder(tiny_model, source=str(forgets))).sample(Sample(TALK, 0))


def test_a_template_without_an_end_of_turn_is_refused(tiny_model: Path, tmp_path: Path):
    endless = tmp_path / "endless.jinja"
    endless.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    encoder = Encoder(ChatTemplate.from_folder(tiny_model, source=str(endless)))
    with pytest.raises(TemplateError, match="could not learn to stop"):
        encoder.sample(Sample([TALK[1], TALK[2]], 0))


TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},
}


def test_tools_that_the_template_leaves_out_are_refused_with_the_remedy(template: ChatTemplate):
    with pytest.raises(TemplateError, match=r"does not render tools.*model\.chat_template=chatml_tools"):
        Encoder(template).sample(Sample(TALK, 4, [TOOL]))
    with pytest.raises(TemplateError, match=r"model\.chat_template=chatml_tools"):
        Encoder(template).pair(Pair(TALK[:4], TALK[4], {"role": "assistant", "content": "no"}, [TOOL]))


def test_tools_are_in_the_prompt_that_a_session_sends(tiny_model: Path):
    template = ChatTemplate.from_folder(tiny_model, source="chatml_tools")
    encoded = Encoder(template).sample(Sample(TALK, 4, [TOOL]))
    prompt = template.first(TALK[:4], [TOOL])
    assert encoded.ids[: len(prompt)] == prompt and "look_up" in template.tokenizer.decode(prompt)
    assert not any(encoded.learned[: len(prompt)]) and all(encoded.learned[len(prompt) :])
    chosen, _, _ = Encoder(template).pair(Pair(TALK[:4], TALK[4], {"role": "assistant", "content": "no"}, [TOOL]))
    assert chosen == prompt


def test_reasoning_that_the_template_leaves_out_is_refused_with_its_own_remedy(template: ChatTemplate):
    said = {"role": "assistant", "content": "two", "reasoning_content": "one and one"}
    with pytest.raises(
        TemplateError, match=r"leaves out the reasoning .*learn.*: put it into the content, leave it out"
    ):
        Encoder(template).sample(Sample([TALK[1], said], 1))


def test_a_developer_message_is_learned_from_as_it_is_sent(template: ChatTemplate):
    sample = sample_of({"messages": [{"role": "developer", "content": "Be brief."}, *TALK[1:3]]})
    assert sample is not None
    encoded = Encoder(template).sample(sample)
    prompt = template.first(sample.messages[:2])
    assert encoded.ids[: len(prompt)] == prompt and "Be brief." in template.tokenizer.decode(prompt)
