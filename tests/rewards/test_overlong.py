import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rewards.overlong import soft_overlong_penalty
from agentrl.rewards.trl_adapter import from_trl
from agentrl.rewards.verdict import MissingReason, judge_answer


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (16_384, 0.0), (18_432, -0.5), (20_480, -1.0), (20_481, -1.0), (10**9, -1.0)]
)
def test_the_papers_numbers(length, penalty):
    assert soft_overlong_penalty(length, max_length=20_480, cache=4_096) == penalty


def test_a_cache_of_0_is_a_step():
    assert soft_overlong_penalty(10, max_length=10, cache=0) == 0.0
    assert soft_overlong_penalty(11, max_length=10, cache=0) == -1.0


@pytest.mark.parametrize("arguments", [(-1, 10, 5), (1, 10, 11), (1, 10, -1)])
def test_wrong_lengths_are_errors(arguments):
    length, max_length, cache = arguments
    with pytest.raises(ValueError, match="0 <= cache <= max_length"):
        soft_overlong_penalty(length, max_length=max_length, cache=cache)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 100), st.data())
def test_the_numbers_are_trls(length, max_length, data):
    rewards = pytest.importorskip("trl.rewards")
    cache = data.draw(st.integers(0, max_length))
    theirs = rewards.get_soft_overlong_punishment(max_length, cache)([[0] * length])[0]
    assert soft_overlong_penalty(length, max_length=max_length, cache=cache) == theirs


async def test_trls_own_functions_are_verifiers():
    rewards = pytest.importorskip("trl.rewards")
    formed = from_trl(rewards.think_format_reward)
    assert (await judge_answer(formed, "<think>a</think>b", None)).value == 1.0
    assert (await judge_answer(formed, "b", None)).value == 0.0
    repeated = from_trl(rewards.get_repetition_penalty_reward(ngram_size=2))
    assert repeated("", None, completion_ids=[5, 5, 5, 5, 5]).value == -0.75


async def test_what_a_trl_function_is_given_and_gives():
    seen = {}

    def reward(prompts, completions, target, **kwargs):
        seen.update(prompts=prompts, completions=completions, target=target, **kwargs)
        return [None]

    verdict = from_trl(reward, column="target")("yes", 42, prompt="what?", level=3)
    assert (verdict.value, verdict.reason) == (None, MissingReason.UNSAID)
    assert seen == {
        "prompts": [[{"role": "user", "content": "what?"}]],
        "completions": [[{"role": "assistant", "content": "yes"}]],
        "target": [42],
        "level": [3],
    }


async def test_async_functions_and_plain_strings():
    async def reward(prompts, completions, solution, **kwargs):
        return [float(completions == solution)]

    assert (await judge_answer(from_trl(reward, conversational=False), "a", "a")).value == 1.0


@pytest.mark.parametrize("returned", [1.0, [], [1.0, 2.0], "1", None])
def test_anything_but_a_list_of_one_is_an_error(returned):
    with pytest.raises(TypeError, match="list of one number"):
        from_trl(lambda **kwargs: returned)("a", "b")


def test_a_number_that_is_none_names_the_function():
    with pytest.raises(TypeError, match=r"test_overlong\.py:\d+\) returned reward True"):
        from_trl(lambda **kwargs: [True])("a", "b")
