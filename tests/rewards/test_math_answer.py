import asyncio
import importlib.util
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.host.worker_pool import WorkerPool
from agentrl.rewards.math_answer import CHECK, math_reward, math_verdict
from agentrl.rewards.verdict import MissingReason, Verdict

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def pool():
    made = WorkerPool(2, memory=4 << 30)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        ("0.5", "1/2", 1.0),
        (r"The answer is \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac12}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{2}", r"\frac{1}{2}", 0.0),
        (r"\boxed{\{3,2,1\}}", r"\{1,2,3\}", 1.0),
        (r"\boxed{\{3,2\}}", r"\{1,2,3\}", 0.0),
        (r"\boxed{(0,1]}", "(0,1]", 1.0),
        (r"\boxed{[0,1]}", "(0,1]", 0.0),
        (r"\boxed{1}", "(0,1]", 0.0),
        (r"\boxed{2}", r"(-\infty, 2)", 0.0),
        (r"\boxed{10\text{ cm}}", "10 cm", 1.0),
        (r"\boxed{10\text{ cm}}", "10", 1.0),
        (r"$x^2+2x+1$", "(x+1)^2", 1.0),
        (r"\boxed{3}", "x=3", 1.0),
        (r"\boxed{0.5}", "50%", 1.0),
        ("so 1234", "1,234", 1.0),
        (r"$\sqrt{12}$", r"2\sqrt{3}", 1.0),
        ("So 3 + 4 = 7.\n#### 7", "3 + 4 = <<3+4=7>>7\n#### 7", 1.0),
        (r"5 or \boxed{6}", "5", 0.0),
        (r"\boxed{100000}", "1e5", 1.0),
        (r"\boxed{1.5e-3}", "0.0015", 1.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{\frac{1}{", "5", 0.0),
        ("(" * 5000, "5", 0.0),
    ],
)
async def test_equivalences(pool, answer, reference, reward):
    assert await math_reward(answer, reference, pool=pool) == reward


@pytest.mark.parametrize("reference", ["", "  ", r"\boxed{}", "$$", "?!", r"\frac{"])
async def test_a_reference_that_is_no_mathematics_is_an_error(pool, reference):
    with pytest.raises(ValueError, match="cannot be parsed as mathematics"):
        await math_reward("5", reference, pool=pool)


def test_it_works_off_the_main_thread():
    found: list[float | None] = []

    def run() -> None:
        pool = WorkerPool(1)
        found.extend(asyncio.run(math_reward(answer, "1/2", pool=pool)) for answer in ("0.5", "0.6"))
        pool.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


@pytest.mark.parametrize("answer", [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7^{13841287201}}", r"\boxed{(10^{9})!}"])
async def test_an_endless_expression_is_missing_and_hurts_no_other_call(pool, answer):
    await math_reward("0.5", "1/2", pool=pool)
    endless = asyncio.create_task(math_verdict(answer, "5", timeout=1.0, pool=pool))
    others = await asyncio.gather(*(math_reward(rf"\boxed{{{n}}}", "3", pool=pool) for n in range(6)))
    assert others == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    verdict = await endless
    assert verdict.value is None
    assert verdict.reason in (MissingReason.TIMEOUT, MissingReason.CRASHED)


class FakePool(WorkerPool):
    """Runs a function of the test in place of the verifier."""

    def __init__(self, function: str) -> None:
        super().__init__(1)
        self.function = function

    async def run(self, function, *args, timeout):
        assert function == CHECK
        return await super().run(self.function, timeout=timeout)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("tests.host.blocking:hang", MissingReason.TIMEOUT),
        ("tests.host.blocking:segfault", MissingReason.CRASHED),
    ],
)
async def test_a_hung_or_crashed_verifier_is_missing_never_0(function, reason):
    pool = FakePool(function)
    verdict = await math_verdict("1", "1", timeout=0.5, pool=pool)
    assert (verdict.value, verdict.reason) == (None, reason)
    assert function in verdict.detail
    assert await math_reward("1", "1", timeout=0.5, pool=pool) is None
    pool.close()


async def test_without_the_extra_the_error_names_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "agentrl.rewards.math_answer.find_spec", lambda name: None if name == "math_verify" else find(name)
    )
    with pytest.raises(ImportError, match=r"pip install -e '\.\[rewards\]'"):
        await math_reward("1", "1")


def test_our_process_never_imports_sympy():
    assert "agentrl.rewards.math_check" not in sys.modules


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text() | st.text(alphabet="0123456789^+-*/(){}[],.$\\ xefracboxdsqt=<>%!_\n").map(lambda s: rf"\boxed{{{s}}}")
)
def test_no_answer_breaks_it(pool, answer):
    verdict = asyncio.run(math_verdict(answer, "1/2", timeout=2.0, pool=pool))
    assert isinstance(verdict, Verdict)
    assert verdict.value in (0.0, 1.0, None)
