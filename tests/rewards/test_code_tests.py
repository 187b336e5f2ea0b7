import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rewards.code_tests import HARNESS, STARTED, CodeTests, IOTest, extract_code
from agentrl.rewards.code_values import Call, NotPlainError, calls_of, decode
from agentrl.rewards.sandbox import Ended, Execution, Isolation, Limits, SandboxUnavailableError, make_sandbox
from agentrl.rewards.verdict import MissingReason


class FakeSandbox:
    """Answers from a list, the last one again and again, and remembers what it was asked."""

    isolation = Isolation.NONE

    def __init__(self, *script: Execution | Exception) -> None:
        self.script = list(script)
        self.runs: list[tuple[str, str]] = []

    async def run(self, command, *, files=(), stdin="", limits=None):
        raise NotImplementedError

    async def run_python(self, code, *, stdin="", files=(), limits=None):
        self.runs.append((code, stdin))
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(said, Exception):
            raise said
        return said


def execution(stdout: str = "", *, ended: Ended = Ended.EXITED, code: int | None = 0) -> Execution:
    return Execution(stdout, "", code, ended, 0.1, Isolation.NONE)


@pytest.fixture
async def sandbox():
    try:
        return await make_sandbox(limits=Limits(seconds=10.0, cpu_seconds=10.0))
    except SandboxUnavailableError as error:
        pytest.skip(f"no sandbox here: {error}")


DOUBLE = "```python\ndef f(x):\n    return 2 * x\n```"
GUARDED = ["assert f(2) == 4", "assert [0] == f([0])[:1]", "assert f(0) is not None, 'loose'"]


async def test_right_and_wrong_solutions(sandbox):
    tests = [
        "assert f(2) == 4",
        "assert 6 == f(3)",
        "assert sorted(f([2, 1])) == [1, 1, 2, 2]",
        "y = f(1)\nassert y < 3",
    ]
    verdict = await CodeTests(sandbox)(DOUBLE, tests)
    assert verdict.value == 1.0
    assert verdict.metrics == {"guarded": 0.75, "tests_passed": 1.0}
    square = "def f(x):\n    return x * x"
    assert (await CodeTests(sandbox)(square, ["assert f(2) == 4", "assert f(3) == 6"])).value == 0.0
    half = await CodeTests(sandbox, score="fraction")(square, ["assert f(2) == 4", "assert f(3) == 6"])
    assert half.value == half.metrics["tests_passed"] == 0.5


async def test_input_and_output(sandbox):
    program = "for line in open(0):\n    print(int(line) * 2, end='  \\n')"
    tests = [IOTest("1\n2\n", "2\n4\n"), IOTest("5", "10")]
    assert (await CodeTests(sandbox)(program, tests)).value == 1.0
    assert (await CodeTests(sandbox)(program, [IOTest("1", "3")])).value == 0.0
    main = "def main():\n    print(input())\n\nif __name__ == '__main__':\n    main()"
    assert (await CodeTests(sandbox, strict=True)(main, [IOTest("x", "x")])).value == 1.0


@pytest.mark.parametrize(
    "value",
    [
        "(1, 'a')",
        "[(1,), {2}]",
        "{'a': (1, 2.5)}",
        "{1: None}",
        "2 ** 200",
        "b'\\x00'",
        "1 + 2j",
        "-0.5",
        "True",
        "'\\ud800'",
        "10 ** 5000",
    ],
)
async def test_plain_values_come_back_as_they_are(sandbox, value):
    literal = repr(eval(value)) if value != "10 ** 5000" else hex(10**5000)
    assert (
        await CodeTests(sandbox, strict=True)(f"def f():\n    return {value}", [f"assert f() == {literal}"])
    ).value == 1.0


async def test_values_that_python_calls_equal_are_equal(sandbox):
    code = """
from fractions import Fraction
from decimal import Decimal
from collections import OrderedDict, Counter, namedtuple
from enum import Enum
class Colour(str, Enum):
    RED = "red"
half = lambda: Fraction(1, 2)
decimal = lambda: Decimal("0.5")
ordered = lambda: OrderedDict(a=1)
counted = lambda: Counter("aab")
point = lambda: namedtuple("Point", "x y")(1, 2)
colour = lambda: Colour.RED
keys = lambda: {1: 2}.keys()
class Solution:
    def add(self, a, b): return a + b
"""
    tests = [
        "assert half() == 0.5",
        "assert decimal() == 0.5",
        "assert ordered() == {'a': 1}",
        "assert point() == (1, 2)",
    ]
    tests += ["assert counted() == {'a': 2, 'b': 1}", "assert colour() == 'red'", "assert keys() == {1}"]
    tests += ["assert Solution().add(1, 2) == 3"]
    verdict = await CodeTests(sandbox, score="fraction", strict=True)(code, tests)
    assert verdict.value == 1.0


CHEATS = {
    "leaves early": "import os\nos._exit(0)",
    "leaves politely": "import sys\nsys.exit(0)",
    "leaves when called": "import os\ndef f(*a):\n    os._exit(0)\ng = f",
    "raises SystemExit when called": "def f(*a):\n    raise SystemExit(0)\ng = f",
    "leaves at exit": "import atexit, os\natexit.register(os._exit, 0)",
    "prints and leaves": "import os\nprint('passed', flush=True)\nos.write(1, b'passed')\nos._exit(0)",
    "writes to every descriptor": "import os\nfor n in range(3, 20):\n    try: os.write(n, b'passed')\n"
    "    except OSError: pass\nos._exit(0)",
    "reads stdin": "import os, sys\nd = os.read(0, 99999) + sys.stdin.buffer.read()\nos.write(1, d)\nos._exit(0)",
    "reads its files": "import glob, os\nfor n in glob.glob('**', recursive=True):\n"
    "    os.write(1, open(n, 'rb').read()) if os.path.isfile(n) else 0\nos._exit(0)",
    "looks at main": "import __main__, os\nos.write(1, repr(vars(__main__)).encode())\nos._exit(0)",
    "hangs": "while True: pass",
    "is no Python": "def f(:",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_no_cheat_of_these_passes_any_kind_of_test(sandbox, cheat):
    tests = ["assert f(2) == 4", "x = f(2)\nassert x == 4", "assert g(1)", IOTest("2", "4")]
    verdict = await CodeTests(sandbox, score="fraction", limits=Limits(seconds=3.0))(CHEATS[cheat], tests)
    assert verdict.value == 0.0
    assert verdict.reason is None


ALWAYS_EQUAL = """
class Yes:
    __hash__ = None
    def __eq__(self, other): return True
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __call__(self, *a): return self
    def __getitem__(self, key): return self
f = g = Yes()
"""
READS_THE_EXPECTED = """
import gc, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
        frame = frame.f_back
    seen += [o for o in gc.get_objects() if isinstance(o, (tuple, list, dict))]
    text = repr(seen)
    return 'found' if ''.join(reversed('73313')) in text else 'hidden'
"""


async def test_an_object_that_equals_everything_equals_nothing_in_a_guarded_test(sandbox):
    tests = ["assert f(2) == 4", "assert f(2)", "assert f(1)[0] == 'a'"]
    assert (await CodeTests(sandbox, score="fraction", strict=True)(ALWAYS_EQUAL, tests)).value == 0.0


async def test_what_is_expected_is_not_in_the_solutions_process(sandbox):
    assert (await CodeTests(sandbox, strict=True)(READS_THE_EXPECTED, ["assert f(2) == 31337"])).value == 0.0
    assert (await CodeTests(sandbox, strict=True)(READS_THE_EXPECTED, ["assert f(2) == 'hidden'"])).value == 1.0


async def test_what_is_expected_is_never_sent():
    sandbox = FakeSandbox(execution("started\n[]"))
    await CodeTests(sandbox, score="fraction")(DOUBLE, ["assert f(2) == 31337", IOTest("7", "31337")])
    assert len(sandbox.runs) == 2
    assert not any("31337" in part for run in sandbox.runs for part in run)


async def test_every_run_has_a_nonce_of_its_own():
    sandbox = FakeSandbox(execution("started\npassed"))
    verdict = await CodeTests(sandbox, score="fraction")(DOUBLE, ["x = f(1)"] * 2)
    assert verdict.value == 0.0
    nonces = {json.loads(stdin)["nonce"] for _, stdin in sandbox.runs}
    assert len(nonces) == 2 and all(len(nonce) == 32 for nonce in nonces)


@pytest.mark.parametrize("trouble", [SandboxUnavailableError("gone"), execution(ended=Ended.NOT_STARTED, code=None)])
async def test_a_sandbox_that_fails_is_missing_never_0(trouble):
    for score in ("all", "fraction"):
        verdict = await CodeTests(FakeSandbox(trouble), score=score)(DOUBLE, ["assert f(2) == 4"])
        assert (verdict.value, verdict.reason) == (None, MissingReason.SANDBOX)


async def test_a_harness_that_never_started_is_missing():
    for end in (execution("", code=1), execution("", ended=Ended.MEMORY, code=None), execution("start", code=1)):
        verdict = await CodeTests(FakeSandbox(end))(DOUBLE, ["assert f(2) == 4"])
        assert (verdict.value, verdict.reason) == (None, MissingReason.SANDBOX)


async def test_a_failure_decides_whatever_else_is_missing():
    replies = (execution("1"), SandboxUnavailableError("gone"))
    tests = [IOTest("", "2"), IOTest("", "2")]
    assert (await CodeTests(FakeSandbox(*replies), concurrency=2)(DOUBLE, tests)).value == 0.0
    assert (await CodeTests(FakeSandbox(*reversed(replies)), concurrency=2)(DOUBLE, tests)).value == 0.0
    assert (await CodeTests(FakeSandbox(*replies), score="fraction")(DOUBLE, tests)).value is None


async def test_all_or_nothing_stops_at_the_first_failure():
    sandbox = FakeSandbox(execution("1"))
    assert (await CodeTests(sandbox, concurrency=1)(DOUBLE, [IOTest("", "2")] * 10)).value == 0.0
    assert len(sandbox.runs) == 1


@pytest.mark.parametrize("ended", [end for end in Ended if end not in (Ended.EXITED, Ended.NOT_STARTED)])
async def test_what_the_code_did_to_itself_is_0_not_missing(ended):
    sandbox = FakeSandbox(execution("2", ended=ended, code=None))
    assert (await CodeTests(sandbox)(DOUBLE, [IOTest("", "2")])).value == 0.0


async def test_wrong_tests_are_errors():
    tests = CodeTests(FakeSandbox(execution()))
    for reference, text in (
        ([], "at least one"),
        ("assert f()", "want a list"),
        (["assert f( =="], "not valid Python"),
    ):
        with pytest.raises(ValueError, match=text):
            await tests(DOUBLE, reference)
    with pytest.raises(ValueError, match="strict"):
        await CodeTests(FakeSandbox(execution()), strict=True)(DOUBLE, ["x = f(1)"])
    with pytest.raises(ValueError, match="some"):
        CodeTests(FakeSandbox(execution()), score="some")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First\n```py\nx = 1\n```\nthen\n```python\nx = 2\n```\n", "x = 2\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
    ],
)
def test_the_code_of_an_answer(answer, code):
    assert extract_code(answer) == code


@pytest.mark.parametrize(
    ("test", "calls"),
    [
        ("assert f(2) == 4", [Call("f(2)", 4)]),
        ("assert 4 == f(2), 'message'", [Call("f(2)", 4)]),
        ("assert f(1) == -1\nassert not g()", [Call("f(1)", -1), Call("g()", False, "truth")]),
        ("assert f() is None", [Call("f()", None, "is")]),
        ("assert f() is True", [Call("f()", True, "is")]),
        ("assert Solution().add(1, 2) == 3", [Call("Solution().add(1, 2)", 3)]),
        ("assert sorted(f()) == [1]", [Call("sorted(f())", [1])]),
        ("assert f(2) < 4", None),
        ("assert abs(f(2) - 4) < 1e-6", None),
        ("assert math.isclose(f(2), 4.0)", None),
        ("assert all(f(x) for x in [1])", None),
        ("assert (f(2) == 4) == True", None),
        ("assert f(2) == g(2)", None),
        ("assert f(2) == 4 == 4", None),
        ("assert f(2) != 4", None),
        ("assert 1 == 1", None),
        ("x = 1\nassert f(x) == 4", None),
        ("", None),
    ],
)
def test_which_tests_can_be_guarded(test, calls):
    assert calls_of(test) == calls


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        {},
        {"raised": "ValueError"},
        {"value": 4, "more": 1},
        {"value": {"other": "Yes"}},
        {"value": {"set": [[1]]}},
        {"value": {"int": "x"}},
        {"value": {"fraction": [1, 0]}},
        {"value": {"decimal": "x"}},
        {"value": {"tuple": 4}},
        {"value": {"dict": [1]}},
        {"value": {"complex": [1, 2, 3]}},
        {"value": {"bytes": "zz"}},
        {"value": {}},
    ],
)
def test_replies_that_the_harness_did_not_write_hold_nothing(reply):
    assert not Call("f()", 4).holds(reply)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["int", "tuple", "set", "dict", "bytes", "complex", "fraction", "float"]), inner
        )
    ),
)


@settings(deadline=None)
@given(json_values)
def test_no_reply_breaks_the_decoder(reply):
    with contextlib.suppress(NotPlainError):
        decode(reply)
    assert Call("f()", object()).holds({"value": reply}) is False


def test_the_harness_names_nothing_of_ours():
    assert "agentrl" not in HARNESS.read_text()
    assert f"STARTED = {json.dumps(STARTED)}" in HARNESS.read_text()
