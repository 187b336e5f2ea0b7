"""gpt-oss in several turns: its template ends the last turn with ``<|return|>``, and earlier ones with ``<|end|>``."""

from typing import Any

import pytest

from agentrl.core.episode import Message
from agentrl.inference.backend import SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.supervised.examples import Sample
from agentrl.supervised.tokens import Encoder
from tests.flat import flat_branches
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_template_zoo import FILES, TOOLS
from tests.inference.tokenizer_kinds import KINDS

SPECIAL = [f"<|{word}|>" for word in ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext")]
ENDS = ("<|return|>", "<|endoftext|>", "<|call|>")  # as its generation_config.json has them
HELLO: Message = {"role": "user", "content": "the user"}
MORE: Message = {"role": "user", "content": "more"}
THOUGHT = "<|channel|>analysis<|message|>yes<|end|><|start|>assistant"
FINAL = f"{THOUGHT}<|channel|>final<|message|>12<|return|>"
CALL = f'{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": "1"}}<|call|>'
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=400), 100_000, locked=True, model="m")


def load(policy: Any, name: str = "gptoss") -> ChatTemplate:
    tokenizer = KINDS["bytes"](SPECIAL)
    tokenizer.chat_template = FILES[name].read_text()
    return ChatTemplate(tokenizer, end_ids=[tokenizer.convert_tokens_to_ids(end) for end in ENDS], policy=policy)


def start(template: ChatTemplate, *replies: str) -> tuple[ChatSession, FakeBackend]:
    """A session whose server answers with these texts; one without an end token is cut."""
    given = iter(replies)

    def script(ids: list[int], params: SamplingParams) -> Any:
        text = next(given)
        return answer(template.encode(text), finish="stop" if text.endswith(ENDS) else "length")

    backend = FakeBackend(script)
    return ChatSession(backend, template, SETTINGS), backend


def sent(template: ChatTemplate, backend: FakeBackend) -> list[str]:
    return [template.tokenizer.decode(ids) for ids, _ in backend.requests]


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
async def test_append_goes_on_behind_the_answer_as_it_was_sampled(name: str) -> None:
    template = load("append", name)
    session, backend = start(template, FINAL, FINAL)
    first = (await session.create(messages=[HELLO])).choices[0].message
    assert (first.content, first.reasoning_content) == ("12", "yes")
    second = (await session.create(messages=[HELLO, first, MORE])).choices[0].message
    assert second.content == "12"
    before, after = sent(template, backend)
    assert after == f"{before}{FINAL}<|start|>user<|message|>more<|end|><|start|>assistant"
    (flat,) = flat_branches(session.trajectory)
    trained = [token for token, mask in zip(flat.token_ids, flat.loss_mask, strict=True) if mask]
    assert trained == template.encode(FINAL) * 2


async def test_branch_renders_the_conversation_as_the_format_is_documented() -> None:
    template = load("branch")
    session, backend = start(template, FINAL, FINAL)
    first = (await session.create(messages=[HELLO])).choices[0].message
    await session.create(messages=[HELLO, first, MORE])
    said: Message = {"role": "assistant", "content": "12"}
    before, after = sent(template, backend)
    assert after == template.render([HELLO, said, MORE], generation=True)
    assert after.startswith(f"{before}<|channel|>final<|message|>12<|end|><|start|>user")
    assert [sum(flat.loss_mask) for flat in flat_branches(session.trajectory)] == [len(template.encode(FINAL))] * 2


@pytest.mark.parametrize(("cut", "closed"), [
    ("<|channel|>final<|message|>12", "<|end|>"),
    ("<|channel|>analysis<|message|>yes<|end|>", ""),
])  # fmt: skip
async def test_an_answer_that_was_cut_is_ended_as_an_earlier_turn(cut: str, closed: str) -> None:
    template = load("append")
    session, backend = start(template, cut, FINAL)
    first = (await session.create(messages=[HELLO])).choices[0].message
    await session.create(messages=[HELLO, first, MORE])
    before, after = sent(template, backend)
    assert after == f"{before}{cut}{closed}<|start|>user<|message|>more<|end|><|start|>assistant"
    assert not any(session.trajectory.nodes[-2].loss_mask)


@pytest.mark.parametrize("policy", [None, "append", "branch"])
async def test_results_of_a_call_follow_it_whatever_the_policy(policy: Any) -> None:
    template = load(policy)
    session, backend = start(template, CALL, FINAL)
    first = (await session.create(messages=[HELLO], tools=TOOLS)).choices[0].message
    (call,) = first.tool_calls
    result: Message = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    second = (await session.create(messages=[HELLO, first, result], tools=TOOLS)).choices[0].message
    assert (call.function.name, second.content) == ("add", "12")
    before, after = sent(template, backend)
    added = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    assert after == before + CALL + added
    (_,) = flat_branches(session.trajectory)


async def test_without_a_policy_the_remedy_is_named() -> None:
    template = load(None)
    session, _ = start(template, FINAL)
    first = (await session.create(messages=[HELLO])).choices[0].message
    with pytest.raises(TemplateError, match=r"inference\.history=append.*inference\.history=branch"):
        await session.create(messages=[HELLO, first, MORE])


async def test_a_call_and_its_result_and_another_question() -> None:
    for policy in ("append", "branch"):
        template = load(policy)
        session, backend = start(template, CALL, FINAL, FINAL)
        messages: list[Any] = [HELLO, (await session.create(messages=[HELLO], tools=TOOLS)).choices[0].message]
        messages.append({"role": "tool", "tool_call_id": messages[1].tool_calls[0].id, "content": "2"})
        messages.append((await session.create(messages=messages, tools=TOOLS)).choices[0].message)
        messages.append(MORE)
        await session.create(messages=messages, tools=TOOLS)
        last = sent(template, backend)[-1]
        assert last.endswith("<|start|>user<|message|>more<|end|><|start|>assistant")
        assert ("yes<|end|>" in last) == (policy == "append")


def test_reasoning_reaches_the_template_in_its_own_field() -> None:
    """It reads ``thinking``; beside a call it takes reasoning or content, and fails with both."""
    template = load("branch")
    thought: Message = {"role": "assistant", "content": "12", "reasoning_content": "yes"}
    encoded = Encoder(template).sample(Sample([HELLO, thought], 0))
    learned = [token for token, mask in zip(encoded.ids, encoded.learned, strict=True) if mask]
    assert template.tokenizer.decode(learned) == FINAL
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    result: Message = {"role": "tool", "tool_call_id": "c", "content": "2"}
    called = {**thought, "content": "", "tool_calls": [call]}
    assert THOUGHT in template.tokenizer.decode(template.first([HELLO, called, result], TOOLS))
    both = {**called, "content": "I add."}  # as a model says it: a thought, a preamble, a call
    text = template.tokenizer.decode(template.first([HELLO, both, result], TOOLS))
    assert "I add." in text and THOUGHT not in text
    with pytest.raises(TemplateError, match="leaves out the reasoning"):
        Encoder(template).sample(Sample([HELLO, both, result], 0, TOOLS))
    plain = load("branch", "qwen3")
    assert "yes" in plain.tokenizer.decode(plain.first([HELLO, both, result], TOOLS)), "others take both"


@pytest.mark.parametrize("source", [
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ ' ok<|return|>' if loop.last else "
    "' no<|end|>' }}{% endif %}{% endfor %}",
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% if loop.last and m.role == 'assistant' %}"
    "<|return|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}",
])  # fmt: skip
def test_other_text_at_the_end_of_a_turn_is_still_refused(source: str) -> None:
    """Text that changes, and a last turn alone that has an end: there the next turn's first token ends nothing."""
    tokenizer: Any = load("append").tokenizer
    tokenizer.chat_template = source
    odd = ChatTemplate(tokenizer, policy="append")
    with pytest.raises(TemplateError, match="renders the end of a turn differently"):
        odd.following([MORE], answered={"role": "assistant", "content": "12"}, answer_ids=[1])
