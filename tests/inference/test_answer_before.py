"""Which answer a new conversation goes on from: found where it is known, and left out where it is not."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.core.episode import Node
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.ledger import Ledger
from agentrl.inference.messages import essence
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from tests.inference.fakes import FakeBackend

Said = dict[str, Any]


def user(text: str) -> Said:
    return {"role": "user", "content": text}


def answer(text: str) -> Said:
    return {"role": "assistant", "content": text}


def sample(ledger: Ledger, parent: int, *texts: str) -> list[int]:
    """Stores the samples of one call."""
    nodes = [
        Node(
            parent=parent, message=answer(text), token_ids=[1], loss_mask=[1], logprobs=[0.0], versions=[0],
            finish_reason="stop",
        )
        for text in texts
    ]  # fmt: skip
    return [ledger.add(node) for node in nodes]


def follows(ledger: Ledger, messages: list[Said]) -> int | None:
    """Begins a conversation, and returns what its first message says that it follows."""
    last = ledger.add_prompt(None, messages, [1], "")
    return ledger.node(ledger.trajectory.path(last)[0]).follows


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_the_sample_that_the_agent_went_on_with(ledger: Ledger) -> None:
    first, second = sample(ledger, ledger.add_prompt(None, [user("q")], [1], ""), "a", "b")
    assert follows(ledger, [user("q"), answer("b"), user("r")]) == second
    assert follows(ledger, [user("q"), answer("a"), user("r")]) == first


def test_equal_samples_are_the_first_and_equal_answers_the_one_after_the_same_messages(ledger: Ledger) -> None:
    early = sample(ledger, ledger.add_prompt(None, [user("q")], [1], ""), "yes", "yes")
    long = [user("q"), answer("yes"), user("r")]
    late = sample(ledger, ledger.add_prompt(None, long, [1], ""), "yes", "yes")
    assert follows(ledger, [user("q"), answer("yes"), user("other")]) == early[0]
    assert follows(ledger, [*long, answer("yes"), user("other")]) == late[0]


def test_a_shortened_history_before_the_latest_answer(ledger: Ledger) -> None:
    early = sample(ledger, ledger.add_prompt(None, [user("q")], [1], ""), "old")
    late = sample(ledger, ledger.add_prompt(early[0], [user("r")], [1], ""), "x", "y")
    assert follows(ledger, [user("a summary"), answer("y"), user("go on")]) == late[1]
    assert follows(ledger, [user("an example"), answer("old"), user("another question")]) is None


def test_nothing_is_made_up(ledger: Ledger) -> None:
    assert follows(ledger, [user("q"), answer("never sampled"), user("r")]) is None
    sample(ledger, ledger.add_prompt(None, [user("q")], [1], ""), "a")
    assert follows(ledger, [user("q")]) is None
    assert follows(ledger, [user("q"), answer("a, as the agent changed it"), user("r")]) is None


def test_many_equal_answers_cost_one_look_at_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always says the same made each turn as dear as all turns before it, for each of its answers."""
    looks = 0

    def counted(message: Said) -> str:
        nonlocal looks
        looks += 1
        return essence(message)

    monkeypatch.setattr("agentrl.inference.ledger.essence", counted)
    found = Ledger()
    messages = [user("same")]
    for _ in range(40):
        sample(found, found.add_prompt(None, messages, [1], ""), "same")
        messages = [*messages, answer("same"), user("same")]
        looks = 0
        last = follows(found, messages)
        assert last is not None and found.node(last).finish_reason == "stop"
    assert looks <= 2 * len(messages)


async def test_a_message_object_that_the_agent_changed_is_another_message(tiny_model: Path) -> None:
    """It was taken for unchanged because it is the same object: the model did not see what the agent made of it."""
    template = ChatTemplate.from_folder(tiny_model)
    backend = FakeBackend(lambda ids, params: Generation([5, template.eos_id], [0.0] * 2, [0] * 2, "stop"))
    session = ChatSession(
        backend, template, SessionSettings(SamplingParams(max_new_tokens=20), 500, locked=True, model="m")
    )
    said = (await session.create(messages=[user("a")])).choices[0].message
    messages = [user("a"), said, user("b")]
    await session.create(messages=messages)
    said.content = "left out"
    await session.create(messages=[*messages, answer("c"), user("d")])
    assert "left out" in template.text(backend.requests[-1][0])
