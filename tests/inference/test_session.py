"""Sessions: token-in, token-out, masks, branches, aborts, limits."""

from pathlib import Path

import pytest

from agentrl.core.episode import NOT_SAMPLED, Message
from agentrl.inference.backend import ContextOverflow, InferenceError, SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from tests.inference.fakes import FakeBackend, Script, answer

HELLO: Message = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def make_session(template: ChatTemplate, script: Script, *, context: int = 500, locked: bool = True) -> ChatSession:
    settings = SessionSettings(SamplingParams(max_new_tokens=20), context, locked=locked, model="m")
    return ChatSession(FakeBackend(script), template, settings)


def ids_of(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenizer.encode(text, add_special_tokens=False)


async def test_the_second_turn_sends_exactly_the_stored_ids_and_the_new_ones(template: ChatTemplate) -> None:
    odd = [*ids_of(template, "u"), *ids_of(template, "ser"), template.eos_id]  # "user" in a way no encoder splits it
    assert odd[:-1] != ids_of(template, "user")
    session = make_session(template, lambda ids, params: answer(odd, version=3))
    first = await session.create(messages=[HELLO])
    said = {"role": "assistant", "content": first.choices[0].message.content}
    assert said["content"] == "user"
    await session.create(messages=[HELLO, said, {"role": "user", "content": "more"}])
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    (sent_first, _), (sent_second, _) = backend.requests
    expected = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert sent_second == [*sent_first, *odd, *ids_of(template, expected)]


async def test_sampled_tokens_carry_mask_logprob_and_version_and_no_others_do(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5, 6, template.eos_id], version=7))
    await session.create(messages=[HELLO])
    (flat,) = session.trajectory.sequences()
    prompt = len(flat.token_ids) - 3
    assert flat.loss_mask == [0] * prompt + [1, 1, 1]
    assert flat.logprobs == [0.0] * prompt + [-1.0, -2.0, -3.0]
    assert flat.versions == [NOT_SAMPLED] * prompt + [7, 7, 7]


async def test_a_turn_cut_off_by_length_is_closed_with_a_token_that_is_not_trained(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer(ids_of(template, "abc"), finish="length"))
    first = await session.create(messages=[HELLO])
    assert first.choices[0].finish_reason == "length"
    said = {"role": "assistant", "content": "abc"}
    await session.create(messages=[HELLO, said, HELLO])
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    added = backend.requests[1][0][len(backend.requests[0][0]) + 3 :]
    assert added == ids_of(template, "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    node = session.trajectory.nodes[-2]
    assert node.token_ids == added and not any(node.loss_mask)


async def test_an_aborted_request_goes_on_with_its_ids_and_its_exact_budget(template: ChatTemplate) -> None:
    parts = iter([answer([1, 2], version=1, finish="abort"), answer([], finish="abort"), answer([3], version=2)])
    session = make_session(template, lambda ids, params: next(parts))
    await session.create(messages=[HELLO])
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    prompt = backend.requests[0][0]
    assert [ids for ids, _ in backend.requests] == [prompt, [*prompt, 1, 2], [*prompt, 1, 2]]
    assert [params.max_new_tokens for _, params in backend.requests] == [20, 18, 18]
    node = session.trajectory.nodes[-1]
    assert (node.token_ids, node.versions, node.finish_reason) == ([1, 2, 3], [1, 1, 2], "stop")


async def test_a_server_that_only_aborts_is_an_error(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([], finish="abort"))
    with pytest.raises(InferenceError, match="aborted one request"):
        await session.create(messages=[HELLO])


async def test_several_samples_of_a_turn_are_branches_that_share_its_prompt(template: ChatTemplate) -> None:
    replies = iter([answer([5, template.eos_id]), answer([6, 7, template.eos_id])])
    session = make_session(template, lambda ids, params: next(replies))
    response = await session.create(messages=[HELLO], n=2)
    assert len(response.choices) == 2
    assert len(session.trajectory.nodes) == 3
    flats = session.trajectory.sequences()
    assert [sum(f.loss_mask) for f in flats] == [2, 3]


async def test_a_conversation_that_rewrites_history_starts_over_instead_of_mixing(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5, template.eos_id]))
    await session.create(messages=[HELLO])
    other = [{"role": "user", "content": "another"}, {"role": "assistant", "content": "x"}, HELLO]
    await session.create(messages=other)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    assert backend.requests[1][0] == template.first(other)
    assert len(session.trajectory.sequences()) == 2


async def test_a_sampled_token_shared_by_two_branches_is_trained_once(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5, template.eos_id]))
    first = await session.create(messages=[HELLO])
    said = {"role": "assistant", "content": first.choices[0].message.content}
    await session.create(messages=[HELLO, said, {"role": "user", "content": "a"}])
    await session.create(messages=[HELLO, said, {"role": "user", "content": "b"}])
    assert [sum(f.loss_mask) for f in session.trajectory.sequences()] == [4, 2]
    assert session.trajectory.sampled_tokens() == 6


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(template: ChatTemplate) -> None:
    session = make_session(template, lambda ids, params: answer([5]), context=10)
    with pytest.raises(ContextOverflow, match=r"prompt of \d+ tokens does not fit inference.context_length=10"):
        await session.create(messages=[HELLO])


async def test_the_answer_gets_only_the_room_that_the_context_leaves(template: ChatTemplate) -> None:
    length = len(template.first([HELLO]))
    session = make_session(template, lambda ids, params: answer([5]), context=length + 4)
    await session.create(messages=[HELLO], max_completion_tokens=100)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    assert backend.requests[0][1].max_new_tokens == 4


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"top_p": 0.9}])
async def test_training_refuses_another_distribution(template: ChatTemplate, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="behavior logprobs wrong"):
        await make_session(template, lambda ids, params: answer([5])).create(messages=[HELLO], **options)
    free = make_session(template, lambda ids, params: answer([5]), locked=False)
    await free.create(messages=[HELLO], **options)


async def test_an_unknown_option_is_refused_by_name(template: ChatTemplate) -> None:
    with pytest.raises(TypeError, match="logit_bias"):
        await make_session(template, lambda ids, params: answer([5])).create(messages=[HELLO], logit_bias={})
