"""Runs model-written Python against tests in a sandbox.

Guarantees, for every kind of test: a solution that exits early, with any exit code, fails the test; if the sandbox
fails, the reward is missing, never 0; no code of a model runs outside the sandbox.

- ``IOTest`` and assertions that compare with a literal (``assert f(2) == 4``, ``assert not g("x")``): the expected
  value never enters the sandbox. The solution sees only inputs, and its outputs are compared outside as plain data, so
  an object with an ``__eq__`` that is always true does not pass. (A true-or-false answer can be guessed.)
- Any other test code runs in the solution's process, and passes if a random nonce of this run is printed after
  its last line. The nonce cannot be guessed or read from a file, a variable of the solution or stdin. It is NOT safe
  from a solution that inspects the interpreter (frames, ``gc``) or changes what the test relies on (``builtins``, an
  ``__eq__`` that is always true). The share of the first kind is logged as ``guarded``; ``strict=True`` refuses others.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from agentrl.rewards.code_values import Call, calls_of
from agentrl.rewards.places import Places
from agentrl.rewards.sandbox import Ended, Execution, Limits, Sandbox, SandboxUnavailableError
from agentrl.rewards.verdict import MissingReason, Verdict

HARNESS = Path(__file__).with_name("code_harness.py")
STARTED = "started\n"  # printed by the harness before the solution is loaded
_BLOCK = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = {"", "python", "python3", "py"}


@dataclass(frozen=True)
class IOTest:
    """A program's input and its expected output.

    Attributes:
        stdin: Text on the program's stdin.
        stdout: Expected output; white space at the ends of lines and of the output is ignored.
    """

    stdin: str
    stdout: str


class _Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    MISSING = "missing"
    SKIPPED = "skipped"  # another test has failed already


class CodeTests:
    """Verifier ``(answer, reference)``: scores a solution by its tests.

    Args:
        sandbox: Sandbox that runs the code.
        score: ``"all"`` gives 1.0 if every test passes, else 0.0, and stops at the first failure; ``"fraction"`` gives
            the share of tests that pass.
        limits: Limits of one test's run; the sandbox's own by default.
        concurrency: Largest number of concurrent runs.
        strict: Whether to refuse tests that the solution could tamper with, see the module.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        score: Literal["all", "fraction"] = "all",
        limits: Limits | None = None,
        concurrency: int = 4,
        strict: bool = False,
    ) -> None:
        if score not in ("all", "fraction"):
            raise ValueError(f"CodeTests(score={score!r}): want 'all' or 'fraction'")
        self.sandbox = sandbox
        self.score = score
        self.strict = strict
        self._limits = limits
        self._places = Places(concurrency)
        self._harness = HARNESS.read_text()

    async def __call__(self, answer: str, reference: Sequence[IOTest | str]) -> Verdict:
        """Run an answer's code.

        Args:
            answer: Code, or text with code in fenced blocks, of which the last Python block is run.
            reference: List of tests, each an :class:`IOTest` or test code. Each test is one run of the code.

        Returns:
            The score; missing (``sandbox``) if a sandbox failure left it undecided. Metrics: ``tests_passed`` and
            ``guarded``, both shares.

        Raises:
            ValueError: There is no test, a test is not valid Python, or ``strict`` refuses one.
        """
        if not reference or isinstance(reference, str | Mapping):
            raise ValueError(f"reference={reference!r:.200}: want a list of at least one test")
        for test in reference:
            if not isinstance(test, IOTest | str):
                raise TypeError(
                    f"test {test!r:.200}: want IOTest(stdin, stdout), or test code such as 'assert f(1) == 2'"
                )
        tests = [test if isinstance(test, IOTest) else calls_of(test) or test for test in reference]
        loose = [test for test in tests if isinstance(test, str)]
        if loose and self.strict:
            raise ValueError(f"strict: this test is no comparison with a literal: {loose[0][:200]!r}")
        code = extract_code(answer)
        outcomes: list[_Outcome] = []
        async with asyncio.TaskGroup() as group:
            for test in tests:
                group.create_task(self._outcome(code, test, outcomes))
        return self._verdict(outcomes, 1 - len(loose) / len(tests))

    def _verdict(self, outcomes: list[_Outcome], guarded: float) -> Verdict:
        passed = outcomes.count(_Outcome.PASSED)
        metrics = {"guarded": guarded}
        if _Outcome.SKIPPED not in outcomes and _Outcome.MISSING not in outcomes:
            metrics["tests_passed"] = passed / len(outcomes)
        if self.score == "all" and _Outcome.FAILED in outcomes:
            return Verdict(0.0, metrics=metrics)
        missing = outcomes.count(_Outcome.MISSING)
        if missing:
            detail = f"{missing} of {len(outcomes)} runs failed for a reason outside the code"
            return Verdict.missing(MissingReason.SANDBOX, detail, metrics)
        return Verdict(passed / len(outcomes), metrics=metrics)

    async def _outcome(self, code: str, test: IOTest | list[Call] | str, outcomes: list[_Outcome]) -> None:
        async with self._places:
            if self.score == "all" and _Outcome.FAILED in outcomes:
                outcomes.append(_Outcome.SKIPPED)
                return
            try:
                outcomes.append(await self._run(code, test))
            except SandboxUnavailableError:
                outcomes.append(_Outcome.MISSING)

    async def _run(self, code: str, test: IOTest | list[Call] | str) -> _Outcome:
        nonce = secrets.token_hex(16)
        if isinstance(test, IOTest):
            program, stdin = code, test.stdin
        else:
            asked = {"test": test, "nonce": nonce} if isinstance(test, str) else {"calls": [c.source for c in test]}
            program, stdin = self._harness, json.dumps({"solution": code, **asked})
        execution = await self.sandbox.run_python(program, stdin=stdin, limits=self._limits)
        if execution.ended is Ended.NOT_STARTED:
            return _Outcome.MISSING
        if not isinstance(test, IOTest) and not execution.stdout.startswith(STARTED):
            return _Outcome.MISSING  # it ended before the solution was loaded
        if execution.ended is not Ended.EXITED or execution.exit_code != 0:
            return _Outcome.FAILED
        return _Outcome.PASSED if _passes(execution, test, nonce) else _Outcome.FAILED


def _passes(execution: Execution, test: IOTest | list[Call] | str, nonce: str) -> bool:
    if isinstance(test, IOTest):
        return _lines(execution.stdout) == _lines(test.stdout)
    said = execution.stdout.removeprefix(STARTED)
    if isinstance(test, str):
        return said == nonce
    try:
        replies: Any = json.loads(said)
    except (ValueError, RecursionError):  # the solution's process may print anything
        return False
    if not isinstance(replies, list) or len(replies) != len(test):
        return False
    return all(call.holds(reply) for call, reply in zip(test, replies, strict=True))


def extract_code(answer: str) -> str:
    """Returns the last fenced block in Python or without a language, or the whole answer if there is none."""
    blocks = [code for language, code in _BLOCK.findall(answer) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else answer


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
