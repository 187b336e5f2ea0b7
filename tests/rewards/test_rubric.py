import asyncio
import functools
import math
import os
import threading
from fractions import Fraction

import pytest

from agentrl.rewards.rubric import Criterion, Rubric
from agentrl.rewards.verdict import MissingReason, Verdict, as_verdict, judge_answer
from tests.host import blocking


def right(answer, reference):
    return float(answer == reference)


async def half(answer, reference):
    return 0.5


def nothing(answer, reference):
    return None


def hang(answer, reference):
    blocking.hang()


def crash(answer, reference):
    os._exit(1)


def late(answer, reference):
    return Verdict.missing(MissingReason.TIMEOUT, "too late")


async def test_the_total_is_the_weighted_sum_and_each_value_is_logged():
    rubric = Rubric([Criterion("right", right, 2.0), Criterion("style", half, -1.0), Criterion("logged", half, 0.0)])
    verdict = await rubric("a", "a")
    assert verdict.value == 1.5
    assert verdict.metrics == {"right": 1.0, "style": 0.5, "logged": 0.5}


async def test_a_missing_value_makes_the_total_missing():
    verdict = await Rubric([Criterion("right", right), Criterion("late", late)])("a", "a")
    assert (verdict.value, verdict.reason) == (None, MissingReason.TIMEOUT)
    assert verdict.metrics == {"right": 1.0, "late/missing": 1.0}
    assert verdict.detail == "late: timeout: too late"


async def test_skip_leaves_it_out_and_keeps_the_sum_of_weights():
    rubric = Rubric([Criterion("right", right, 1.0), Criterion("late", late, 3.0)], missing="skip")
    verdict = await rubric("a", "a")
    assert verdict.value == 4.0
    assert "late" in verdict.detail
    assert (await Rubric([Criterion("late", late)], missing="skip")("a", "a")).value is None


async def test_a_missing_value_without_weight_changes_nothing_but_the_log():
    verdict = await Rubric([Criterion("right", right), Criterion("late", late, 0.0)])("a", "a")
    assert verdict.value == 1.0
    assert verdict.metrics["late/missing"] == 1.0


async def test_references_by_name():
    rubric = Rubric([Criterion("one", right), Criterion("two", right)])
    assert (await rubric("a", {"one": "a", "two": "b"})).metrics == {"one": 1.0, "two": 0.0}


async def test_verifiers_run_at_the_same_time_and_off_the_event_loop():
    barrier = threading.Barrier(3)
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def meet(answer, reference):
        barrier.wait()
        loop.call_soon_threadsafe(event.set)
        return 1.0

    async def wait(answer, reference):
        await event.wait()
        return 1.0

    rubric = Rubric([Criterion(f"meet{n}", meet) for n in range(3)] + [Criterion("wait", wait)])
    assert (await rubric("", "")).value == 4.0


async def test_what_hangs_or_crashes_in_a_process_is_missing():
    rubric = Rubric(
        [
            Criterion("hang", hang, runs="process", timeout=0.05),
            Criterion("crash", crash, runs="process"),
            Criterion("right", right, runs="process"),
        ]
    )
    verdict = await rubric("a", "a")
    assert verdict.value is None
    assert verdict.metrics == {"hang/missing": 1.0, "crash/missing": 1.0, "right": 1.0}
    assert "crash: crashed: " in verdict.detail and "hang: timeout: " in verdict.detail


async def test_async_and_threads_that_take_too_long_are_missing():
    release = threading.Event()

    async def never(answer, reference):
        await asyncio.Event().wait()

    def stuck(answer, reference):
        release.wait()

    for verifier in (never, stuck):
        assert (await judge_answer(verifier, "", "", timeout=0.05)).reason is MissingReason.TIMEOUT
    release.set()


async def test_what_a_verifier_raises_is_raised_with_its_name_and_the_others_end():
    ended = asyncio.Event()

    async def fail(answer, reference):
        raise ValueError("a wrong reference")

    async def wait(answer, reference):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ValueError, match="a wrong reference") as caught:
        await Rubric([Criterion("fail", fail), Criterion("wait", wait)])("", "")
    assert "'fail'" in caught.value.__notes__[0]
    assert ended.is_set()


def test_a_rubric_that_cannot_be_is_refused():
    for criteria in ([], [Criterion("a", right, 0.0)], [Criterion("a", right), Criterion("a", half)]):
        with pytest.raises(ValueError, match="Rubric"):
            Rubric(criteria)
    with pytest.raises(ValueError, match="weight"):
        Criterion("a", right, math.nan)
    with pytest.raises(ValueError, match="skip"):
        Rubric([Criterion("a", right)], missing="zero")  # type: ignore[arg-type]


class Told:
    def __init__(self, value):
        self.value = value

    def __call__(self, answer, reference):
        return self.value


@pytest.mark.parametrize("value", [True, "1", [1.0], 1j, b"1"])
async def test_what_is_no_number_is_a_type_error_that_names_the_verifier_and_its_line(value):
    line = Told.__call__.__code__.co_firstlineno
    for verifier in (Told(value), functools.partial(Told(value))):
        with pytest.raises(TypeError, match=rf"Told \(.*test_rubric\.py:{line}\) returned"):
            await judge_answer(verifier, "", "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_what_is_not_finite_is_a_value_error(value):
    with pytest.raises(ValueError, match=r"test_rubric\.py:\d+\)"):
        await judge_answer(Told(value), "", "")
    with pytest.raises(ValueError, match="finite"):
        Verdict(value)


async def test_any_real_number_will_do():
    for value in (1, 0.5, Fraction(1, 2)):
        assert (await judge_answer(Told(value), "", "")).value == float(value)


async def test_none_is_missing():
    verdict = await judge_answer(nothing, "", "")
    assert (verdict.value, verdict.reason) == (None, MissingReason.UNSAID)
    assert "nothing" in verdict.detail


def test_a_verdict_has_a_value_or_a_reason():
    with pytest.raises(ValueError, match="exactly one"):
        Verdict(None)
    with pytest.raises(ValueError, match="exactly one"):
        Verdict(1.0, MissingReason.TIMEOUT)
    with pytest.raises(TypeError, match="metric m"):
        as_verdict(Verdict(1.0, metrics={"m": "x"}), right)  # type: ignore[dict-item]
