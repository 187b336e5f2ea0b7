"""Several attempts with hints."""

from typing import Any

import pytest

from agentrl.envs.retry import Retry

TASK = {"question": "What is 17 + 25?", "answer": "42"}


def say(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_a_later_answer_earns_less_and_each_wrong_one_gets_a_hint() -> None:
    env = Retry(attempts=3)
    messages, _ = await env.reset(options=TASK)
    assert messages[0]["content"].startswith("What is 17 + 25?")
    (hint,), reward, terminated, *_ = await env.step(say("41"))
    assert (hint["content"], reward, terminated) == ("That is too small. Try again.", 0.0, False)
    (hint,), *_ = await env.step(say("about 43"))
    assert hint["content"] == "That is too large. Try again."
    observation, reward, terminated, truncated, info = await env.step(say("42"))
    assert (observation, reward, terminated, truncated) == ([], 0.25, True, False)
    assert info["metrics"] == {"accuracy": 1.0, "attempts": 3.0}
    with pytest.raises(RuntimeError, match="after the episode's end"):
        await env.step(say("42"))


async def test_attempts_run_out_and_the_first_is_told_apart() -> None:
    env = Retry(attempts=2, hint=False)
    await env.reset(options=TASK)
    (hint,), *_, info = await env.step(say(None))
    assert hint["content"] == "There is no number in your answer. Try again."
    assert info["metrics"]["first_accuracy"] == 0.0
    assert (await env.step(say("7")))[1:4] == (0.0, True, False)
    await env.reset(options=TASK)
    assert (await env.step(say("42")))[1] == 1.0


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"later": 1.5}])
def test_settings_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Retry(**wrong)


async def test_a_task_without_a_number_is_an_error_not_a_wrong_answer() -> None:
    env = Retry()
    await env.reset(options={"question": "?", "answer": "none"})
    with pytest.raises(ValueError, match="has no number"):
        await env.step(say("1"))
