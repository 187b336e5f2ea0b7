from fractions import Fraction

import pytest

from agentrl.rewards.numeric import final_number, has_answer_line, numeric_reward


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        ("The answer is 4", "4", 1.0),
        ("0.5", "1/2", 1.0),
        (r"\boxed{4}", "4", 1.0),
        ("5", "4", 0.0),
        ("", "4", 0.0),
        (r"\boxed{[90]}", "90", 1.0),
        (r"$\sqrt{4}=2$", "2", 1.0),
        ("so 3 + 4 = 7.\n#### 7", "3 + 4 = <<3+4=7>>7\n#### 7", 1.0),
    ],
)
def test_rewards_of_the_reference_table(answer, reference, reward):
    assert numeric_reward(answer, reference) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", 1234),
        ("#### 3 and then 5", 3),
        ("#### 3\n#### 4", 4),
        ("#### none, say 3", 3),
        (r"\boxed{3} out of 5", 3),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{x^{2}} = 9", None),  # a box without a number has none
        (r"\boxed{2^{2}} = 9", 4),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"1{,}234", 1234),
        ("it costs $1,234.50.", Fraction("1234.5")),
        ("-$3", -3),
        ("$-5.50", Fraction("-5.5")),
        ("\u22125", -5),
        ("it is 50%.", 50),
        ("1 / 2", Fraction(1, 2)),
        ("10-5", 5),
        ("5 - 3", 3),
        ("1,2,3", 3),
        ("4 kg of CO2", 4),
        ("no number", None),
        ("1/0", None),
        ("9" * 5000, None),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == number


def test_a_reference_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="no number"):
        numeric_reward("4", "four")


@pytest.mark.parametrize(
    ("text", "formed"),
    [
        ("#### 72", True),
        ("text\n#### $1,234\n\n", True),
        ("#### -3.5%", True),
        ("#### 72 clips", False),
        ("#### 72\nDone.", False),
        ("the answer is #### 72", False),
        ("72", False),
        ("", False),
    ],
)
def test_the_answer_line_is_the_last_and_holds_nothing_else(text, formed):
    assert has_answer_line(text) is formed
