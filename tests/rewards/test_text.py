import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rewards.text import choice_reward, exact_match_reward, final_choice, regex_reward


@pytest.mark.parametrize(
    ("answer", "reference", "options", "reward"),
    [
        ("Paris", "Paris", {}, 1.0),
        ("  Paris \n", "Paris", {}, 1.0),
        ("New\n York", "New York", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("\uff11", "1", {}, 1.0),
        ("Paris.", "Paris", {}, 0.0),
        ("Paris.", "Paris", {"ignore_punctuation": True}, 1.0),
        ("the Louvre", "Louvre", {"ignore_articles": True}, 1.0),
        ("theatre", "atre", {"ignore_articles": True}, 0.0),
        ("", "Paris", {}, 0.0),
    ],
)
def test_exact_match(answer, reference, options, reward):
    assert exact_match_reward(answer, reference, **options) == reward


def test_a_reference_that_is_nothing_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        exact_match_reward("", "")
    with pytest.raises(ValueError, match="empty"):
        exact_match_reward("", "The.", ignore_articles=True, ignore_punctuation=True)


def test_a_pattern():
    assert regex_reward("it is 42.", r"\b42\b") == 1.0
    assert regex_reward("it is 421.", r"\b42\b") == 0.0
    assert regex_reward(" 42\n", r"\d+", whole=True) == 1.0
    assert regex_reward("a 42", r"\d+", whole=True) == 0.0
    assert regex_reward("YES", "yes", flags=re.IGNORECASE) == 1.0
    with pytest.raises(ValueError, match="no regular expression"):
        regex_reward("x", "(")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**C**", "C"),
        ("D.", "D"),
        ("Reasoning about A and B.\n\nC", "C"),
        ("The answer is B.", "B"),
        ("The correct answer is (C), since A is wrong.", "C"),
        ("Answer: **D**", "D"),
        ("Answer: (A)", "A"),
        ("I first thought the answer is A. No, the answer is D.", "D"),
        (r"the answer is A, no: \boxed{B}", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        ("Option C", "C"),
        ("The answer is a matter of taste.", None),
        ("A cat sat on the mat.", None),
        ("The answer is E.", None),
        ("The answer is Because", None),
        ("", None),
    ],
)
def test_the_final_choice(answer, letter):
    assert final_choice(answer) == letter


def test_choice_rewards():
    assert choice_reward("The answer is B.", "b") == 1.0
    assert choice_reward("The answer is B.", "(B)") == 1.0
    assert choice_reward("The answer is B.", "C") == 0.0
    assert choice_reward("E", "E", choices="ABCDE") == 1.0
    for wrong in ("E", "", "AB"):
        with pytest.raises(ValueError, match="none of the choices"):
            choice_reward("A", wrong)


@settings(deadline=None)
@given(st.text())
def test_no_answer_is_an_error(answer):
    for reward in (exact_match_reward, regex_reward, choice_reward):
        assert reward(answer, "A") in (0.0, 1.0)
