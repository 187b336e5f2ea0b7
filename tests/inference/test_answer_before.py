"""Which answer a new conversation goes on from: found where it is known, and left out where it is not."""

from typing import Any

import pytest

from agentrl.core.episode import Node
from agentrl.inference.ledger import Ledger

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
