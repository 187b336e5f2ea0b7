"""Each planted fault is found under its own rule, at its own line; environments without one pass."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.envkit.check.case import Settings
from agentrl.envkit.check.checker import check_environment
from agentrl.envkit.check.findings import Finding, Level, Report
from agentrl.envkit.check.rules import RULES
from tests.envkit.check import faulty, leaky, unsteady

PLANTED = {
    "construct": ["Unmakeable"],
    "signature": ["SyncReset", "OldReset"],
    "spaces": ["NoSpaces"],
    "tool-description": ["SilentTool"],
    "tool-broken": ["MisspelledTool"],
    "dataset": ["NoDatasetFile"],
    "no-task": ["NoTask"],
    "raises": ["Raises", "Exits"],
    "hang": ["HangsAwait", "HangsSpinning"],
    "return": ["FourTuple", "NoInfo", "IntDone"],
    "info": ["TextMetrics"],
    "observation-space": ["OutsideSpace"],
    "reward-type": ["NanReward", "TextReward"],
    "reward-missing": ["NoReward"],
    "empty-observation": ["SilentStart", "SilentTurn"],
    "held-out": ["OneTask"],
    "reward-range": ["LargeReward"],
    "equal-rewards": ["EqualRewards"],
    "odd-action": ["ContentNeeded"],
    "options-mutated": ["ChangesTask"],
    "action-mutated": ["ChangesAction"],
    "observation-reused": ["ReusesObservation"],
    "same-seed": ["Unseeded", "UnseededTask"],
    "different-seeds": ["SameStart"],
    "reset-after-done": ["OneEpisode", "KeepsTurns"],
    "reset-mid-episode": ["NoSecondReset"],
    "step-after-done": ["GoesOn"],
    "step-before-reset": ["StartsItself"],
    "blocks-loop": ["Blocks", "BlockingTool"],
    "background-error": ["Background"],
    "cancel-leak": ["CancelLeaksProcess", "CancelLeaksThread"],
    "cancel-swallowed": ["Swallows"],
    "close": ["CloseRaises", "CloseOnce"],
    "close-leak": ["LeaksFile", "LeaksSocket", "LeaksProcess", "LeaksTask", "LeaksThread"],
    "shared-state": ["SharesState"],
    "global-state": ["ChangesVariables", "ChangesFolder"],
}
ALSO_TAUGHT_BY = {"new-process"}  # has a test of its own
QUICK = Settings(episodes=2, steps=4, seconds=5.0, load_seconds=5.0)


def check(target: Any, **changes: Any) -> Report:
    return check_environment(target, settings=Settings(**{**vars(QUICK), **changes}))


def planted(name: str) -> Any:
    return next(getattr(module, name) for module in (faulty, leaky, unsteady) if hasattr(module, name))


def only(report: Report, rule: str) -> Finding:
    found = [finding for finding in report.findings if finding.check == rule]
    assert len(found) == 1, report.findings
    return found[0]


def test_every_rule_has_a_planted_fault() -> None:
    assert PLANTED.keys() | ALSO_TAUGHT_BY == RULES.keys()


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule, names in PLANTED.items() for name in names])
def test_a_planted_fault_is_found_at_its_line(rule: str, name: str) -> None:
    changes = {"seconds": 0.3} if rule == "hang" else {}
    report = check(planted(name), **changes)
    finding = only(report, rule)
    assert faulty.place_of(name) in finding.where
    assert name in finding.where
    assert (finding.level, finding.why, finding.mend) == (RULES[rule].level, RULES[rule].why, RULES[rule].mend)
    errors = {found.check for found in report.findings if found.level is Level.ERROR}
    assert errors <= {rule}, "one fault, one error"
    assert rule not in report.passed and rule not in report.skipped


@pytest.mark.parametrize("name", ["Good", "Waiting", "Counter"])
def test_an_environment_without_a_fault_passes(name: str) -> None:
    report = check(getattr(faulty, name), episodes=4, steps=16)
    assert not report.findings
    assert report.ok and "shared-state" in report.passed
    assert set(report.passed) | set(report.skipped) == set(RULES)
    assert ("cancel-leak" in report.passed) == (name == "Waiting")


@pytest.mark.parametrize("id", ["Arithmetic-v0", "Calculator-v0", "Retry-v0", "Shapes-v0", "GSM8K-v0"])
def test_what_ships_has_neither_errors_nor_warnings(id: str) -> None:
    task = {"question": "What is 2 + 2?", "answer": "2 + 2 = 4\n#### 4"} if id == "GSM8K-v0" else None
    report = check(id, task=task, episodes=4, steps=16, load_seconds=120.0)
    assert not report.of(Level.ERROR) and not report.of(Level.WARNING)
    assert "new-process" in report.passed


def test_a_tool_without_type_hints_is_named() -> None:
    assert "weigh" in only(check(faulty.UntypedTool), "construct").message


def test_settings_that_cannot_be_pickled_are_found() -> None:
    path = f"{faulty.__file__}:Configured"
    report = check_environment(path, kwargs={"client": lambda: None}, settings=QUICK)
    assert "client" not in report.passed
    assert only(report, "new-process").level is Level.ERROR


def test_a_class_that_no_process_can_import_is_found() -> None:
    finding = only(check(faulty.unpicklable()), "new-process")
    assert faulty.place_of("Local") in finding.where


def test_a_file_that_another_process_cannot_load_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    lines = [
        "import os",
        "from agentrl import SingleTurnEnvironment",
        f"if os.getpid() != {__import__('os').getpid()}:",
        "    raise RuntimeError('only here')",
        "class Mine(SingleTurnEnvironment):",
        "    dataset = [{'q': str(n)} for n in range(9)]",
        "    def prompt(self, task):",
        "        return [{'role': 'user', 'content': task['q']}]",
        "    def judge(self, task, answer):",
        "        return float(len(answer))",
    ]
    file.write_text("\n".join(lines))
    finding = only(check(f"{file}:Mine"), "new-process")
    assert "only here" in finding.message
    assert finding.where == f"{file}:5 Mine"


@pytest.mark.parametrize("line", ["def broken(:", "raise SystemExit(3)", "import no_such_module"])
def test_a_file_that_cannot_be_imported_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"x = 1\n{line}\n")
    finding = only(check(f"{file}:Mine"), "construct")
    assert finding.where.startswith(f"{file}:2")


def test_an_episode_that_is_another_one_in_another_process_is_found() -> None:
    finding = only(check(f"{unsteady.__file__}:OrderOfSet"), "same-seed")
    assert "in a new process, at reset" in finding.message
    assert faulty.place_of("OrderOfSet") in finding.where


def test_what_makes_no_environment_is_found() -> None:
    assert "no agentrl.Environment" in only(check(lambda: object()), "construct").message


def test_what_needs_a_broken_rule_is_skipped_with_the_reason() -> None:
    report = check(faulty.Raises)
    assert [finding.check for finding in report.findings] == ["raises"]
    assert report.skipped["same-seed"] == "needs raises to be mended first"
    assert "construct" in report.passed


def test_a_loop_that_stays_blocked_ends_the_check() -> None:
    report = check(faulty.NeverFree, seconds=0.3)
    finding = only(report, "hang")
    assert faulty.place_of("NeverFree") in finding.where
    assert "still blocked" in report.skipped["new-process"]


def test_the_whole_check_has_a_limit() -> None:
    report = check(faulty.Good, total_seconds=1e-9)
    assert not report.findings and not report.passed
    assert "used up" in report.skipped["construct"]


def test_a_given_task_is_what_reset_gets() -> None:
    class Picky(faulty.NoTask):
        async def reset(self, *, seed=None, options=None):
            assert options == {"question": "7?", "answer": "7"}
            return await super().reset(seed=seed, options=options)

    report = check(lambda: Picky(), task={"question": "7?", "answer": "7"})
    assert not report.findings
    assert report.numbers["reward_max"] == 1.0, "the task's own answer was among the actions"


async def test_it_may_be_called_inside_of_a_running_loop() -> None:
    assert check(faulty.Good).ok
    await asyncio.sleep(0)


def test_the_process_is_put_back() -> None:
    before = Path.cwd()
    check(leaky.ChangesFolder)
    assert Path.cwd() == before


def test_strict_makes_warnings_errors_and_a_report_is_json() -> None:
    report = check(leaky.Swallows)
    assert report.ok and not report.strict().ok
    assert json.loads(json.dumps(report.to_json()))["findings"][0]["check"] == "cancel-swallowed"
