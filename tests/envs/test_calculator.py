"""The calculator: its tool, its rewards, and the prompt with a worked call."""

from typing import Any

import pytest

from agentrl.data.calculation import load
from agentrl.envs.calculator import EXAMPLES, Calculator

TASK = {"question": "What is 348 * 27?", "answer": "9396"}


def calling(*expressions: str) -> dict[str, Any]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "calculate", "arguments": {"expression": text}}}
        for i, text in enumerate(expressions)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


async def test_a_call_and_the_right_number_earn_both_rewards() -> None:
    env = Calculator()
    messages, info = await env.reset(options=TASK)
    assert [one["function"]["name"] for one in info["tools"]] == ["calculate"]
    assert messages[-1]["content"].startswith("What is 348 * 27?")
    (result,), reward, terminated, *_ = await env.step(calling("348 * 27"))
    assert (result["content"], reward, terminated) == ("9396", 0.2, False)
    *_, reward, _, _, _ = await env.step(calling("348 * 27"))
    assert reward == 0.0, "a second call earns nothing"
    _, reward, terminated, _, info = await env.step({"role": "assistant", "content": "It is 9,396."})
    assert (reward, terminated, info["metrics"]["accuracy"]) == (1.0, True, 1.0)
    await env.reset(options=TASK)
    assert (await env.step(calling("1 + 1")))[1] == 0.2, "the next episode may earn it again"


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("2 * (3 + 4)", "14"),
        ("max(3, 7) - abs(-2)", "5"),
        ("9 ** 9 ** 9", "ValueError: 9 ** 387420489 is too large"),
        ("3999999**3999999", "ValueError: 3999999 ** 3999999 is too large"),
        ("9 ** 1000 * 9 ** 1000", "ValueError: the product is too large"),
        ("2 ** 0.5", "1.414"),
        ("'a' * 9", "ValueError: only numbers"),
        ("__import__('os')", "FunctionNotDefined"),
        ("1 / 0", "ZeroDivisionError"),
        ("2 +", "SyntaxError"),
        ("1" * 300, "ValueError: expression is longer than 200"),
    ],
)
async def test_whatever_is_asked_for_is_answered_and_only_a_result_is_paid(expression: str, answer: str) -> None:
    env = Calculator()
    await env.reset(options=TASK)
    (result,), reward, *_ = await env.step(calling(expression))
    assert result["content"].startswith(answer)
    assert reward == (0.2 if answer[0].isdigit() else 0.0)


async def test_one_bad_call_among_good_ones_is_not_paid() -> None:
    env = Calculator()
    await env.reset(options=TASK)
    assert (await env.step(calling("1 + 1", "1 +")))[1] == 0.0
    assert (await env.step(calling("1 + 1", "2 + 2")))[1] == 0.2


async def test_examples_are_worked_and_true() -> None:
    env = Calculator(examples=len(EXAMPLES))
    messages, _ = await env.reset(options=TASK)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"] * len(EXAMPLES) + ["user"]
    for index, (_, expression, answer) in enumerate(EXAMPLES):
        assert messages[4 * index + 1] in env.action_space
        assert str(await env.calculate(expression)) == answer
    with pytest.raises(ValueError, match="examples=3"):
        Calculator(examples=3)


def test_the_dataset_is_right_and_holds_its_test_lines_out() -> None:
    (train, where), (test, _) = load("train", None), load("test", None)
    assert (len(train), len(test)) == (4000, 200) and "one of 10 held out" in where
    assert not {line["question"] for line in train} & {line["question"] for line in test}
    assert all(eval(line["expression"]) == int(line["answer"]) for line in train + test)
    assert load("train", None) == load("train", None)
    more = load("test", None, test=900)[0]
    assert not {line["question"] for line in train} & {line["question"] for line in more}
