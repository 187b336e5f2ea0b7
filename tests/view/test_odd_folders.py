"""The page shows folders of evaluations, of older versions and with odd lines, and refuses odd questions in words."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agentrl.observe.examine_evaluation import examine_evaluation
from agentrl.view.access import Keys
from agentrl.view.episode_row import row_of
from agentrl.view.findings import findings
from agentrl.view.page_app import application
from agentrl.view.shown_runs import ShownRun, shown_runs
from agentrl.view.terminal import show
from tests.view.conftest import append, hostile_episode

ODD: list[Any] = [
    {"a": 1},
    {"group_id": "g", "trajectories": [1]},
    {"group_id": "g", "trajectories": {"assistant": 3}},
    {"group_id": "g", "trajectories": {"assistant": {"nodes": [1]}}},
    {"group_id": "g", "trajectories": {"assistant": {"nodes": [{"message": "text"}]}}},
    {"group_id": "g", "trajectories": {"assistant": {"nodes": [{"message": {"tool_calls": 3}}]}}},
    {"group_id": "g", "trajectories": {"assistant": {"nodes": [{"loss_mask": 3}]}}},
]
KEPT: list[Any] = [
    {"group_id": "odd", "index": 2**70, "version": 2**70, "reward": "much", "metrics": [1], "seconds": "3 s"},
    {"group_id": "odd", "index": 1, "error": {"x": 1}, "tag": 3, "stop_reason": 7, "started": 5, "metrics": {"a": "b"}},
    {"group_id": "odd", "index": 0, "trajectories": {"assistant": {"nodes": [{"new": 1, "message": {"role": "a"}}]}}},
]


def client_of(*runs: ShownRun) -> TestClient:
    keys = Keys()
    client = TestClient(application(list(runs), keys), base_url="http://127.0.0.1:8720")
    assert client.get(f"/?token={keys.token}").status_code == 200
    return client


def test_lines_that_are_no_episodes_are_counted_and_odd_values_are_absent(run: ShownRun) -> None:
    with (run.folder / "episodes.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*ODD, *KEPT])
    run.index.update()
    page = run.index.page(query="group:odd", sort="index", descending=False)
    assert (page.damaged, page.all) == (len(ODD), 65 + len(KEPT))
    assert [row["member"] for row in page.rows] == [0, 1, None] and page.rows[2]["reward"] is None
    assert (page.rows[1]["tag"], page.rows[1]["stop"], page.rows[1]["metrics"]) == ("3", "7", {})
    client = client_of(run)
    for row in page.rows:
        for what in ("", "/tokens"):
            answer = client.get(f"/api/runs/first/train/{row['place']}{what}")
            assert answer.status_code in (200, 400), what
            assert answer.status_code == 200 or "another version of agentrl" in answer.json()["error"]
    assert client.get("/api/runs/first/group", params={"id": "odd"}).status_code == 200
    place = run.index.page().size
    append(run.folder / "episodes.jsonl", ODD[2])
    for what in ("", "/tokens", "/text?role=assistant&node=0"):
        answer = client.get(f"/api/runs/first/train/{place}{what}")
        assert answer.status_code == 400 and "another version" in answer.json()["error"]


@pytest.mark.parametrize(
    "question",
    [
        "/api/runs/none/events",
        "/api/runs/first/group",
        "/api/runs/first/episodes?offset=99999999999999999999999",
        "/api/runs/first/episodes?offset=%C2%B2",
        "/api/runs/first/train/0/text",
        "/api/runs/first/train/0/text?role=assistant&node=-1",
        "/api/runs/first/train/0/text?role=assistant&node=x",
        "/api/runs/first/train/99999999999999999999",
        "/api/runs/first/other/0",
        "/api/task?run=first&limit=x",
        "/api/compare",
    ],
)
def test_an_odd_question_is_answered_with_a_sentence(run: ShownRun, question: str) -> None:
    answer = client_of(run).get(question)
    assert answer.status_code == 400 and len(answer.json()["error"]) > 10


def test_a_task_with_quotes_in_its_name_is_found(run: ShownRun) -> None:
    append(run.folder / "eval-episodes.jsonl", hostile_episode() | {"eval_step": 0})
    run.index.update()
    found = client_of(run).get("/api/task", params={"run": "first", "task": 'train/"odd" <b>', "q": "step=0"}).json()
    assert found["total"] == 1 and found["episodes"][0]["group_id"] == "g-hostile"


def said(number: int, finish: str, **message: Any) -> dict[str, Any]:
    """A recorded episode of an evaluation with one answer."""
    nodes = [
        {"parent": None, "message": {"role": "user", "content": "?"}},
        {"parent": 0, "message": {"role": "assistant", **message}, "finish_reason": finish},
    ]
    return {"group_id": f"eval0-{number}", "task_id": f"test/{number}", "index": 0, "reward": 0.0, "eval_step": 0,
            "stop_reason": "terminated", "trajectories": {"assistant": {"nodes": nodes}}}  # fmt: skip


def test_answers_without_ids_are_as_long_as_the_api_says() -> None:
    """The first of a call's two answers has its number of tokens; if one call lacks it, the length is unknown."""
    record = said(0, "stop", content="4")
    nodes = record["trajectories"]["assistant"]["nodes"]
    assert row_of(record).tokens is None
    nodes[1]["usage"] = {"prompt": 30, "completion": 12}
    nodes += [{**nodes[1], "usage": None}, {"parent": 1, "message": {"role": "user", "content": "?"}}]
    nodes.append({**nodes[1], "parent": 3, "usage": {"prompt": 50, "completion": 5}})
    assert row_of(record).tokens == 17
    nodes[4]["usage"] = {"prompt": 50}
    assert row_of(record).tokens is None


RESULT = {
    **{"eval/n": 4, "eval/invalid": 1, "eval/accuracy": 0.25, "eval/accuracy_low": 0.0, "eval/accuracy_high": 0.7},
    **{"eval/accuracy_if_wrong": 0.2, "eval/accuracy_if_right": 0.4, "eval/solved_tasks": 1.0},
    "answers": {"all": 4, "cut": 1, "empty": 1, "refused": 1, "filtered": 1},
    "failures": {"inference_error: gone": 1},
    "tags": {"hard": {"eval/n": 2, "eval/invalid": 1, "eval/accuracy": 0.5}, "none": {"eval/n": 0}},
    "ended": "eval.max_cost=1 is used up",
}


@pytest.fixture
def evaluated(tmp_path: Path) -> ShownRun:
    folder = tmp_path / "runs" / "measured"
    folder.mkdir(parents=True)
    lost = said(4, "stop", content="?") | {"reward": None, "stop_reason": "inference_error", "error": "gone"}
    answers = [said(0, "length", content="4"), said(1, "stop", content=""), said(2, "refusal", content="no"),
               said(3, "content_filter", content=""), lost]  # fmt: skip
    append(folder / "eval-episodes.jsonl", *answers)
    (folder / "result.json").write_text(json.dumps(RESULT))
    (run,) = shown_runs([], tmp_path / "runs", tmp_path / "cache")
    run.index.update()
    return run


def test_each_finding_about_an_evaluation_links_to_the_episodes_that_show_it(evaluated: ShownRun) -> None:
    kinds = {one.kind for one in examine_evaluation(evaluated.folder)[0]}
    assert kinds == {"invalid", "cut", "empty", "refused", "filtered", "wide", "ended"}
    shown = {one["kind"]: one["episodes"] for one in findings(evaluated.folder)["findings"]}
    found = {}
    for kind, link in shown.items():
        if link is not None:
            page = evaluated.index.page(link["kind"], link["query"], sort=link["sort"].lstrip("-"))
            found[kind] = sorted(row["task"] for row in page.rows)
    assert found.pop("wide") == [f"test/{number}" for number in range(5)] and "ended" not in found
    assert found == {"cut": ["test/0"], "empty": ["test/1"], "refused": ["test/2"], "filtered": ["test/3"],
                     "invalid": ["test/4"]}  # fmt: skip


def test_the_report_of_an_evaluation_has_bounds_and_tags(evaluated: ShownRun) -> None:
    (report,) = client_of(evaluated).get("/api/runs/measured/evaluations").json()["reports"]
    accuracy = {"mean": 0.25, "low": 0.0, "high": 0.7, "if_wrong": 0.2, "if_right": 0.4}
    assert report["metrics"]["accuracy"] == accuracy and "solved_tasks" in report["metrics"]
    assert report["counts"] == {"n": 4, "invalid": 1}
    assert list(report["tags"]) == ["hard"] and report["tags"]["hard"]["name"] == "accuracy"


def test_the_terminal_shows_the_episodes_that_there_are(evaluated: ShownRun, capsys: pytest.CaptureFixture) -> None:
    show([evaluated], None, "", "-place")
    assert "gone" in capsys.readouterr().out


def test_evaluations_of_one_call_are_found_in_their_folder(evaluated: ShownRun, tmp_path: Path) -> None:
    for name in ("several/one", "several/two", "other/three"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    (tmp_path / "runs" / "several" / "asked.json").write_text("{}")
    found = shown_runs([], tmp_path / "runs", tmp_path / "cache2")
    assert {run.key for run in found} == {"measured", "one", "two"}
    assert [run.key for run in shown_runs(["several"], tmp_path / "runs", tmp_path / "cache2")] == ["one", "two"]
