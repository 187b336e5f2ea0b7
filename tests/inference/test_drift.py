"""The drift meter: nothing for a canonical conversation, text for another split, an error for what was not sampled."""

from pathlib import Path

import pytest

from agentrl.core.episode import Message
from agentrl.inference.drift import measure
from agentrl.inference.template import ChatTemplate

MESSAGES: list[Message] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "user"}]


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def stored(template: ChatTemplate, *pieces: str, end: bool = True) -> list[int]:
    """Ids of a prompt and of an answer that was sampled in these pieces."""
    answer = [token for piece in pieces for token in template.tokenizer.encode(piece, add_special_tokens=False)]
    return [*template.first(MESSAGES[:1]), *answer, *([template.eos_id] if end else [])]


def sampled(template: ChatTemplate, ids: list[int], prompt: int = 0) -> list[bool]:
    """Which of the ids were sampled: all after the prompt, which has this many ids more than the template's."""
    size = len(template.first(MESSAGES[:1])) + prompt
    return [place >= size for place in range(len(ids))]


@pytest.mark.parametrize("end", [True, False])
def test_a_canonical_conversation_does_not_drift(template: ChatTemplate, end: bool) -> None:
    ids = stored(template, "user", end=end)
    drift = measure(template, ids, MESSAGES, (), sampled(template, ids))
    assert (drift.special, drift.text) == (False, 0.0)


def test_another_split_of_the_same_text_is_a_share_and_no_error(template: ChatTemplate) -> None:
    ids = stored(template, "u", "ser")
    assert len(ids) > len(stored(template, "user")), "split alike: the test shows nothing"
    drift = measure(template, ids, MESSAGES, (), sampled(template, ids))
    assert not drift.special
    assert 0 < drift.text < 0.5


def test_a_lost_end_of_turn_is_an_error(template: ChatTemplate) -> None:
    ids = stored(template, "user")
    ids.remove(template.eos_id)  # the user's
    assert measure(template, ids, MESSAGES, (), sampled(template, ids, prompt=-1)).special


def test_an_id_too_many_in_what_was_not_sampled_is_an_error(template: ChatTemplate) -> None:
    ids = stored(template, "user")
    (line,) = template.encode("\n")
    ids.insert(ids.index(template.eos_id) + 1, line)  # after the user's turn
    assert measure(template, ids, MESSAGES, (), sampled(template, ids, prompt=1)).special
    ids = stored(template, "user")
    ids.insert(-1, line)  # in the answer
    assert not measure(template, ids, MESSAGES, (), sampled(template, ids)).special


@pytest.mark.parametrize("said", ["<|im_start|><|im_start|>b", "<|im_start|>\n<|im_start|>b"])
def test_special_tokens_inside_an_answer_are_the_models_own(template: ChatTemplate, said: str) -> None:
    """A template may put a line break between two of them that the model did not say."""
    messages: list[Message] = [*MESSAGES[:1], {"role": "assistant", "content": "<|im_start|>\n<|im_start|>b"}]
    ids = stored(template, said)
    assert not measure(template, ids, messages, (), sampled(template, ids)).special


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("pieces", [("user", "<|im_start|>"), ("<|im_start|>", "user"), ("us", "<|im_start|>", "er")])
def test_special_tokens_that_the_message_lacks_are_the_models_own(
    template: ChatTemplate, pieces: tuple[str, ...], end: bool
) -> None:
    ids = stored(template, *pieces, end=end)
    drift = measure(template, ids, MESSAGES, (), sampled(template, ids))
    assert (drift.special, drift.left_out) == (False, True)
