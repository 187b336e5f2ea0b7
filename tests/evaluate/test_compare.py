"""Two evaluations are compared by the tasks that both judged, and differences are told with their certainty."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy.stats import t, ttest_rel

from agentrl.evaluate import stored
from agentrl.evaluate.compare import CompareError, compare, p_value
from agentrl.evaluate.stored import TaskFile, TaskScoresByMetric, read_tasks, write_result
from agentrl.evaluate.tally import TaskScores
from agentrl.launch.compared import print_comparison


def folder(path: Path, tasks: list[TaskScores], **setup: Any) -> Path:
    path.mkdir()
    (path / "setup.json").write_text(json.dumps({"samples": 1, "model": path.name, **setup}))
    lines = TaskFile(path)
    for one in tasks:
        lines.add(one)
    lines.close()
    return path


def task(name: str, *samples: float, digest: str = "d", failed: int = 0) -> TaskScores:
    scores = {"accuracy": sum(samples) / len(samples)} if samples else {}
    return TaskScores(name, None, len(samples), failed, scores, dict(enumerate(samples)), digest)


def test_flips_are_named_and_tested_exactly(tmp_path: Path) -> None:
    before = [task(f"t{number}", float(number < 10)) for number in range(30)]
    after = [task(f"t{number}", float(2 <= number < 20)) for number in range(30)]
    found = compare(folder(tmp_path / "a", before), folder(tmp_path / "b", after))
    one = found.differences["accuracy"]
    assert (one.first, one.second, one.change.mean) == pytest.approx((10 / 30, 18 / 30, 8 / 30))
    assert one.gained == tuple(f"t{number}" for number in range(10, 20)) and one.lost == ("t0", "t1")
    assert one.p == pytest.approx(2 * sum([1, 12, 66]) / 2**12), "McNemar: 2 of 12 flips or fewer, on either side"
    assert found.setups == ("model: 'a', now 'b'",) and found.only == (0, 0)
    out = io.StringIO()
    print_comparison(found, tmp_path / "a", tmp_path / "b", Console(file=out, width=80))
    assert "10 tasks better in B: t10, t11" in out.getvalue() and "2 tasks worse in B: t0, t1" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines()[3:])) <= 80


def test_only_samples_that_both_judged_are_paired(tmp_path: Path) -> None:
    """In the first evaluation the second sample of a task is invalid: it was right in the other."""
    first = [TaskScores("t", None, 1, 1, {"accuracy": 0.0}, {0: 0.0}, "d"), task("u", 1.0, 1.0)]
    second = [task("t", 0.0, 1.0), task("u", 1.0, 0.0)]
    a, b = folder(tmp_path / "a", first, samples=2), folder(tmp_path / "b", second, samples=2)
    one = compare(a, b).differences["accuracy"]
    assert (one.first, one.second) == (0.5, 0.25)


def test_other_contents_and_tasks_of_one_side_are_counted_and_not_compared(tmp_path: Path) -> None:
    first = [task("t", 1.0), task("u", 1.0), task("v", 1.0), task("w", failed=1)]
    second = [task("t", 0.0), task("u", 0.0, digest="other"), task("w", 1.0), task("x", 1.0)]
    found = compare(folder(tmp_path / "a", first), folder(tmp_path / "b", second))
    assert (found.tasks, found.changed, found.only) == (1, 1, (2, 3))
    with pytest.raises(CompareError, match="no task in common"):
        compare(folder(tmp_path / "c", [task("y", 1.0)]), tmp_path / "b")
    with pytest.raises(CompareError, match="holds no scores of an evaluation"):
        compare(tmp_path, tmp_path / "b")


def test_folders_of_an_older_version_and_trainings_are_read_from_their_result(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "result.json").write_text(json.dumps({"per_task": {"accuracy": {"t": 0.0, "u": 1.0}}, "setup": {}}))
    (tmp_path / "eval-000004.json").write_text(json.dumps({"per_task": {"accuracy": {"t": 1.0, "u": 1.0}}}))
    found = compare(old, tmp_path / "eval-000004.json")
    assert found.differences["accuracy"].gained == ("t",)


def test_p_values_of_shares_are_students_of_the_pairs() -> None:
    before, after = [0.25, 0.5, 0.75, 0.0], [0.5, 0.5, 1.0, 0.5]
    assert p_value(before, after) == pytest.approx(ttest_rel(after, before).pvalue)
    many, moved = [*before, *[1.0] * 40], [*after, *[1.0] * 40]  # most do not tell how much those that move differ
    statistic = ttest_rel(moved, many).statistic
    assert p_value(many, moved) == pytest.approx(2 * t.sf(abs(statistic), 1.0**2 / 0.375 + 1))
    assert p_value(before, before) == 1.0 and p_value([0.5], [0.75]) != p_value([0.5], [0.75])


def test_the_result_holds_the_scores_of_the_file_by_metric(tmp_path: Path) -> None:
    run = folder(tmp_path / "a", [task("t", 1.0), task('u"\n', 0.0), TaskScores("v", "x", 0, 1, {}, {})])
    (run / "eval-tasks.jsonl").open("a").write('{"task": "cut')
    write_result(run / "result.json", {"eval/n": 2})
    assert json.loads((run / "result.json").read_text()) == {
        "eval/n": 2,
        "per_task": {"accuracy": {"t": 1.0, 'u"\n': 0.0}},
    }
    assert TaskScoresByMetric(run) == {"accuracy": {"t": 1.0, 'u"\n': 0.0}} and len(list(read_tasks(run))) == 3


@pytest.mark.parametrize("columns", [1, 2, 200])
def test_the_result_holds_the_scores_of_many_metrics(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are more than the files that may be open; not every task has every metric."""
    monkeypatch.setattr(stored, "COLUMNS", columns)
    scores = [{"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 4.0}, {}, {"d": 5.0, "a": 6.0}]
    tasks = [TaskScores(str(number), None, 1, 0, one, {}) for number, one in enumerate(scores)]
    run = folder(tmp_path / "a", tasks)
    write_result(run / "result.json", {"x": 1})
    expected = {"a": {"0": 1.0, "3": 6.0}, "b": {"0": 2.0, "1": 3.0}, "c": {"1": 4.0}, "d": {"3": 5.0}}
    assert json.loads((run / "result.json").read_text()) == {"x": 1, "per_task": expected}
    assert sorted(file.name for file in run.iterdir()) == ["eval-tasks.jsonl", "result.json", "setup.json"]


def test_samples_of_other_seeds_are_no_pairs(tmp_path: Path) -> None:
    """With the same seeds, a sample that one side lost is left out of both; with others each side keeps all it has."""
    first, second = [task("t", 1.0, 0.0)], [TaskScores("t", None, 1, 1, {"accuracy": 1.0}, {0: 1.0}, "d")]
    a = folder(tmp_path / "a", first, samples=2, seed=0)
    for seed, mean in ((0, 1.0), (1, 0.5)):
        b = folder(tmp_path / f"b{seed}", second, samples=2, seed=seed)
        assert compare(a, b).differences["accuracy"].first == mean
