r"""Holds ``numeric_reward`` and ``math_verdict`` to one table of how numbers are read."""

import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.host.worker_pool import WorkerPool
from agentrl.rewards.math_answer import math_reward
from agentrl.rewards.numeric import final_number, has_answer_line, numeric_reward
from tests.rewards import number_table
from tests.rewards.number_table import DIFFERENCES, TABLE

GROUPS = [
    name for name, rows in vars(number_table).items() if isinstance(rows, list) and name not in ("TABLE", "DIFFERENCES")
]
LONG = 100_000
GSM8K_FORMS = ["18", "0", "-7", "1,080", "1080", "-1,250", "109,200,000", "109200000"]  # all forms of its 8,792 answers


@pytest.fixture(scope="module")
def pool():
    pytest.importorskip("math_verify")
    made = WorkerPool(1, memory=4 << 30)
    yield made
    made.close()


def test_the_table_is_large_and_says_nothing_twice():
    assert len(TABLE) >= 150
    assert len({answer for answer, _, _ in TABLE}) == len(TABLE) == sum(len(getattr(number_table, g)) for g in GROUPS)
    assert not [row for row in TABLE if row[1] in row[2]]


@pytest.mark.parametrize(("answer", "value", "misreadings"), TABLE)
def test_numeric_reward_reads_the_number_whole(answer, value, misreadings):
    assert final_number(answer) == (None if value is None else Fraction(value))
    assert value is None or numeric_reward(answer, value) == 1.0
    assert [numeric_reward(answer, wrong) for wrong in misreadings] == [0.0] * len(misreadings)


@pytest.mark.parametrize("group", GROUPS)
async def test_math_verdict_agrees(pool, group):
    faults = []
    for answer, value, misreadings in getattr(number_table, group):
        expected = dict.fromkeys(misreadings, 0.0) | ({} if value is None else {value: 1.0})
        rewards = {reference: await math_reward(answer, reference, pool=pool) for reference in expected}
        faults += [] if rewards == expected else [(answer, rewards)]
    assert faults == []


@pytest.mark.parametrize(("answer", "reference", "numeric", "mathematics", "why"), DIFFERENCES)
async def test_the_two_differ_where_the_table_says_so(pool, answer, reference, numeric, mathematics, why):
    assert numeric != mathematics
    assert numeric_reward(answer, reference) == numeric, why
    assert await math_reward(answer, reference, pool=pool) == mathematics, why


@pytest.mark.parametrize("reference", ["2 1/2", "2½", r"2\frac{1}{2}", "#### 2 1/2", r"\boxed{2 1/2}", "2.5"])
@pytest.mark.parametrize("answer", ["2.5", "5/2", r"\boxed{2\tfrac12}", "#### 2½"])
async def test_a_reference_is_read_like_an_answer(pool, answer, reference):
    assert numeric_reward(answer, reference) == 1.0
    assert await math_reward(answer, reference, pool=pool) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        (r"\boxed{2,1}", "1,2", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        (r"\boxed{x²+1}", "x^2+1", 1.0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
        (r"\boxed{2x}", "2", 0.0),
        (r"\boxed{1+\sqrt{2}}", "1", 0.0),
    ],
)
async def test_other_mathematics_stays_what_it_is(pool, answer, reference, reward):
    assert await math_reward(answer, reference, pool=pool) == reward


@pytest.mark.parametrize("gold", GSM8K_FORMS)
async def test_answers_of_gsm8k_are_right_with_and_without_thousands_separators(pool, gold):
    reference = f"Some reasoning with 3 * 4 = <<3*4=12>>12.\n#### {gold}"
    number = int(gold.replace(",", ""))
    written = [
        f"{number}",
        f"{number:,}",
        f"{number:,}".replace(",", " "),
        f"{number:,}".replace(",", "{,}"),
        f"{number:,}".replace(",", r"\,"),
    ]
    answers = [reference] + [
        form.replace("N", one) for one in written for form in ("#### N", r"\boxed{N}", "So it is N.", "It costs $N.")
    ]
    assert [numeric_reward(answer, reference) for answer in answers] == [1.0] * len(answers)
    assert [await math_reward(answer, reference, pool=pool) for answer in answers] == [1.0] * len(answers)
    assert numeric_reward(f"#### {number + 1}", reference) == 0.0


def steps(call: Callable[[], object]) -> int:
    """Counts the calls, of Python and of C functions, that a call makes."""
    count = 0

    def step(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(step)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "piece",
    [
        "1", "1,", "1 ", "100 ", ",100", "1.", ".", "1/", "1 1/", " ", "\n", "#", "####", "#### ", "-", "(", "1^", "^{",
        "*", "{", "}", r"\boxed{", r"\boxed{1}", r"\frac", r"\frac{", r"\frac{1}{", r"\sqrt{", r"\sqrt[", "\\", "$",
        "1e", "*10^", "½", "²", "√", "√(", "\u0663", "\u00a0", "1 and ", "1 000 ", "a", "_{",
    ],
)  # fmt: skip
def test_the_work_grows_linearly_with_the_text(piece):
    """A pattern that backtracks would not end on these; calls of Python's loops are counted."""
    text = (piece * LONG)[:LONG] + "x"
    assert steps(lambda: final_number(text)) <= 100 * LONG


@settings(max_examples=500, deadline=None)
@given(st.text() | st.text(alphabet="0123456789^+-*/(){}[],.$\\ efracboxdsqt=%_'#½²\u0663\u00a0\n"))
def test_no_text_breaks_the_reader(text):
    assert isinstance(final_number(text), Fraction | None)
    assert has_answer_line(text) in (True, False)


def test_a_long_answer_is_read_as_a_short_one_with_the_same_end() -> None:
    for end, value in (
        ("so it is 7 and then", 7),
        ("it is 1 2/3.", Fraction(5, 3)),
        ("½", Fraction(1, 2)),
        ("none", 3),
    ):
        for length in (1, 300, 1590, 1605, 6500):
            text = "3 apples " + "word " * (length // 5) + end
            assert final_number(text) == value, (end, length)
    assert final_number("word " * 10_000) is None
    assert final_number("#### 4" + " word" * 1000 + " 9 ####" + " word" * 1000) == 4
