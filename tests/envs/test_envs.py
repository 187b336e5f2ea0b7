import pytest

from agentrl.agents.chat import ChatAgent
from agentrl.core.registry import load
from agentrl.envs.arithmetic import Arithmetic
from agentrl.envs.gsm8k import EXAMPLES, GSM8K

PROBLEM = {"question": "How many?", "answer": "3 + 4 = 7\n#### 7"}


@pytest.mark.parametrize(
    ("answer", "reward", "metrics"),
    [
        ("3 + 4 = 7\n#### 7", 1.2, {"accuracy": 1.0, "format": 1.0}),
        ("It is 7.", 1.0, {"accuracy": 1.0, "format": 0.0}),
        ("#### 8", 0.2, {"accuracy": 0.0, "format": 1.0}),
        ("no idea", 0.0, {"accuracy": 0.0, "format": 0.0}),
    ],
)
async def test_gsm8k_rewards_number_and_format_apart(answer, reward, metrics):
    env = GSM8K()
    messages, _ = await env.reset(options=PROBLEM)
    assert "How many?" in messages[0]["content"]
    assert "#### <number>" in messages[0]["content"]
    _, got, terminated, truncated, info = await env.step({"role": "assistant", "content": answer})
    assert got == pytest.approx(reward)
    assert (terminated, truncated) == (True, False)
    assert info["metrics"] == metrics


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("42", 1.0),
        ("17 + 25 = 42.", 1.0),
        ("42 or 43", 0.0),
        ("", 0.0),
        ("-42", 0.0),
        ("17-42", 1.0),
        ("9" * 5000, 0.0),
    ],
)
async def test_arithmetic_compares_the_last_integer(answer, reward):
    env = Arithmetic()
    messages, _ = await env.reset(options={"question": "What is 17 + 25?", "answer": "42"})
    assert messages == [{"role": "user", "content": "What is 17 + 25? Reply with just the number."}]
    _, got, *_, info = await env.step({"role": "assistant", "content": answer})
    assert got == reward
    assert info["metrics"] == {"accuracy": reward}


def test_registered_names_lead_to_these_classes():
    assert load("env", "gsm8k") is GSM8K
    assert load("env", "arithmetic") is Arithmetic
    assert load("agent", "chat") is ChatAgent


@pytest.mark.parametrize(
    ("answer", "reward"), [("42", 1.0), ("It is 47.", 0.25), ("142", 0.0), ("24", 0.0), ("", 0.0), ("-2", 0.0)]
)
async def test_a_wrong_sum_earns_its_right_digits_and_never_accuracy(answer, reward):
    env = Arithmetic(digit_reward=0.5)
    await env.reset(options={"question": "What is 17 + 25?", "answer": "42"})
    _, got, terminated, _, info = await env.step({"role": "assistant", "content": answer})
    assert (got, terminated, info["metrics"]) == (reward, True, {"accuracy": float(reward == 1.0)})


@pytest.mark.parametrize("digit_reward", [-0.1, 1.0])
def test_wrong_digits_may_not_earn_as_much_as_a_right_sum(digit_reward):
    with pytest.raises(ValueError, match="digit_reward"):
        Arithmetic(digit_reward=digit_reward)


def test_examples_are_earlier_turns_that_keep_the_format():
    messages = GSM8K(examples=2).prompt({"question": "How many?", "answer": "#### 1"})
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    judge = GSM8K()
    for question, answer in EXAMPLES:
        number = answer.rsplit(" ", 1)[1]
        assert judge.judge({"question": question, "answer": f"#### {number}"}, answer)[1] == {
            "accuracy": 1,
            "format": 1,
        }
    with pytest.raises(ValueError, match="examples=3"):
        GSM8K(examples=3)
