"""The page's answers, asked as the page asks them."""

import json
import subprocess
import sys
import threading

import pytest
from starlette.testclient import TestClient

from agentrl.config.errors import UserError
from agentrl.core.trainer_logprobs import FILE, gaps_line, read_gaps
from agentrl.view import page_files
from agentrl.view.access import COOKIE, Keys
from agentrl.view.answers import MOST_TEXT
from agentrl.view.episode_files import episode_file
from agentrl.view.page_app import application, run_events
from agentrl.view.shown_runs import shown_runs
from tests.view.conftest import HOSTILE, append, hostile_episode


@pytest.fixture
def keys():
    return Keys()


@pytest.fixture
def stranger(runs, keys):
    return TestClient(application(runs, keys), base_url="http://127.0.0.1:8720", follow_redirects=False)


@pytest.fixture
def client(stranger, keys):
    assert stranger.get(f"/?token={keys.token}").status_code == 303
    return stranger


def got(client, path, **query):
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_nothing_is_shown_without_the_link(stranger):
    for path in ("/", "/view.js", "/api/runs", "/api/runs/first/episodes", "/?token=guess", "/?token="):
        answer = stranger.get(path)
        assert answer.status_code == 403
        assert "first" not in answer.text


def test_a_link_works_once_and_the_next_one_is_said(runs):
    said = []
    keys = Keys(used=said.append)
    first = keys.token
    client = TestClient(application(runs, keys), base_url="http://127.0.0.1:8720", follow_redirects=False)
    answer = client.get(f"/?token={first}&a=b")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?a=b")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}_8720=") and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert client.get("/api/runs").status_code == 200
    other = TestClient(application(runs, keys), base_url="http://127.0.0.1:8720", follow_redirects=False)
    assert other.get(f"/?token={first}").status_code == 403
    assert said == [keys.token] and keys.token != first
    assert other.get(f"/?token={keys.token}").status_code == 303


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8720", "", "10.0.0.1:8720"])
def test_a_host_name_of_others_is_refused(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("path", ["/", "/api/runs", "/nothing", "/api/runs/none"])
def test_every_answer_forbids_what_is_not_ours(client, path):
    policy = client.get(path).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert client.get(path).headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_place():
    import re

    for text in (page_files.document(), page_files.style(), page_files.script()):
        places = set(re.findall(r"(?:https?:)?//[a-z][a-z0-9.-]+\.[a-z]{2,}", text)) - {
            "http://www.w3.org",
            "https://github.com",
        }  # of SVG; a comment
        assert not places
    own = page_files.script().split('"use strict"', 1)[1]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "dangerouslySetInnerHTML"):
        assert way not in own


def test_runs_are_listed_with_what_their_folders_say(client, runs):
    found = got(client, "/api/runs")["runs"]
    assert [one["key"] for one in found] == ["first", "second"]
    assert (found[0]["step"], found[0]["total"], found[0]["metric"]) == (2, 2, "eval/reward")


def test_the_overview_describes_each_metric(client):
    found = got(client, "/api/runs/first")
    described = {one["name"]: one for one in found["metrics"]}
    assert described["reward/mean_drawn"]["over"] and described["time/step"]["unit"] == "s"
    assert found["episodes"]["train"]["choices"]["tag"] == ["easy", "hard"]
    assert found["config"]["trainer"]["advantage"] == "group"


def test_settings_are_shown_without_secrets(client, runs):
    config = runs[0].config() | {"agent": {"kwargs": {"api_key": "sk-123", "api_key_env": "KEY"}}}
    (runs[0].folder / "config.json").write_text(json.dumps(config))
    shown = got(client, "/api/runs/first")["config"]["agent"]["kwargs"]
    assert shown == {"api_key": "[redacted]", "api_key_env": "KEY"}


def test_curves_are_columns_with_gaps(client):
    found = got(client, "/api/runs/first/curves", name=["reward/mean_drawn", "eval/reward", "no/such"])["columns"]
    assert found["step"] == [0.0, 1.0, 2.0]
    assert found["reward/mean_drawn"][0] is None and isinstance(found["reward/mean_drawn"][1], float)
    assert found["eval/reward"] == [0.3, None, None]
    assert found["no/such"] == [None, None, None]


def test_the_table_is_filtered_sorted_and_paged(client):
    found = got(client, "/api/runs/first/episodes", q="reward<0.5", sort="length", offset="1", limit="3")
    lengths = [row["tokens"] for row in found["rows"]]
    assert lengths == sorted(lengths) and len(lengths) == 3 and found["total"] < found["all"] == 65
    answer = client.get("/api/runs/first/episodes", params={"q": "rewad<1"})
    assert answer.status_code == 400 and "did you mean 'reward'" in answer.json()["error"]
    for wrong in ({"offset": "x"}, {"kind": "none"}, {"sort": "none"}):
        assert client.get("/api/runs/first/episodes", params=wrong).status_code == 400


def _place(client, query):
    return got(client, "/api/runs/first/episodes", q=query)["rows"][0]["place"]


def test_an_episode_comes_with_its_messages_and_calls(client):
    place = _place(client, "group:g3 index=2")
    found = got(client, f"/api/runs/first/train/{place}")
    nodes = found["roles"]["assistant"]["nodes"]
    assert [node["message"]["role"] for node in nodes] == ["user", "assistant", "tool", "assistant"]
    assert [node["sampled"] for node in nodes] == [False, True, False, True]
    assert nodes[1]["message"]["tool_calls"][0]["function"]["name"] == "calculate"
    assert found["row"]["place"] == place and len(found["siblings"]) == 8
    assert "token_ids" not in nodes[0]


def test_what_a_model_said_stays_as_it_is(client):
    found = got(client, f"/api/runs/first/train/{_place(client, 'group:g-hostile')}")
    assert found["roles"]["assistant"]["nodes"][-1]["text"] == HOSTILE
    assert client.get("/api/runs/first").headers["content-type"] == "application/json"


def test_the_ledger_has_each_token_and_says_what_is_not_recorded(client, runs):
    place = _place(client, "group:g3 index=2")
    found = got(client, f"/api/runs/first/train/{place}/tokens")
    record = episode_file(runs[0].folder, "train").read(place)
    nodes = record["trajectories"]["assistant"]["nodes"]
    blocks = found["roles"]["assistant"]
    assert [block["ids"] for block in blocks] == [node["token_ids"] for node in nodes]
    assert blocks[1]["logprobs"] == nodes[1]["logprobs"] and set(blocks[0]["logprobs"]) == {None}
    assert [block["start"] for block in blocks] == [
        0,
        24,
        24 + len(nodes[1]["token_ids"]),
        32 + len(nodes[1]["token_ids"]),
    ]
    assert found["trained"] == 1 and found["as_text"] is False and "no tokenizer" in found["tokenizer"]
    assert any("trainer" in one for one in found["not_recorded"]) and any(
        "teacher" in one for one in found["not_recorded"]
    )


def test_the_trainers_logprobs_stand_beside_those_of_the_server(client, runs):
    """They are kept of the first group of each step."""
    place = _place(client, "group:g4 index=2")
    found = got(client, f"/api/runs/first/train/{place}/tokens")
    gaps = read_gaps(runs[0].folder, episode_file(runs[0].folder, "train").read(place))["assistant"]
    prompt, answer, result, last = found["roles"]["assistant"]
    assert prompt["trainer"] == result["trainer"] == [] and not any("trainer" in one for one in found["not_recorded"])
    for block, own in ((answer, gaps[1]), (last, gaps[3])):
        assert [b - t for b, t in zip(block["logprobs"], block["trainer"], strict=True)] == pytest.approx(own, abs=1e-6)
    (runs[0].folder / FILE).write_text(gaps_line(1, "g4", 2, {"assistant": {1: [0.5]}}))
    found = got(client, f"/api/runs/first/train/{place}/tokens")["roles"]["assistant"][1]["trainer"]
    assert found[0] == pytest.approx(answer["logprobs"][0] - 0.5) and set(found[1:]) == {None}, "what is missing"


def test_a_long_message_comes_in_part_and_whole_when_asked(client, runs):
    record = hostile_episode() | {"group_id": "g-long"}
    record["trajectories"]["assistant"]["nodes"][-1]["message"]["content"] = "y" * 10_000_000
    append(runs[0].folder / "episodes.jsonl", record)
    runs[0].index.update()
    place = _place(client, "group:g-long")
    node = got(client, f"/api/runs/first/train/{place}")["roles"]["assistant"]["nodes"][-1]
    assert (len(node["text"]), node["length"]) == (MOST_TEXT, 10_000_000)
    whole = got(client, f"/api/runs/first/train/{place}/text", role="assistant", node="3")
    assert len(whole["text"]) == 10_000_000
    assert client.get(f"/api/runs/first/train/{place}/text", params={"role": "none", "node": "3"}).status_code == 400


def test_a_group_stands_side_by_side_with_its_advantages(client):
    found = got(client, "/api/runs/first/group", kind="train", id="g3")
    rewards = [one["reward"] for one in found["members"]]
    mean = sum(rewards) / len(rewards)
    assert [one["advantage"] for one in found["members"]] == pytest.approx([reward - mean for reward in rewards])
    assert found["members"][0]["conversation"][0]["text"].startswith("What is")
    hostile = got(client, "/api/runs/first/group", kind="train", id="g-hostile")["members"][0]
    assert hostile["advantage"] is None and not hostile["counted"]
    assert client.get("/api/runs/first/group", params={"id": "g99"}).status_code == 400


def test_evaluations_are_shown_and_compared_task_by_task(client, runs):
    reports = got(client, "/api/runs/first/evaluations")["reports"]
    assert [one["step"] for one in reports] == [0, 10]
    assert reports[0]["metrics"]["reward"]["low"] is not None and reports[0]["counts"]["n"] == 32
    query = {"run1": "first", "name1": "eval-000000", "run2": "second", "name2": "eval-000010"}
    found = got(client, "/api/compare", **query)
    first, second = (json.loads((run.folder / f"{name}.json").read_text())["per_task"]["reward"]
                     for run, name in zip(runs, ("eval-000000", "eval-000010"), strict=True))  # fmt: skip
    assert found["metrics"]["reward"]["tasks"] == 32
    assert found["metrics"]["reward"]["mean"] == pytest.approx(sum(second[t] - first[t] for t in first) / 32)
    moved = [one["task"] for one in found["tasks"] if one["first"]["reward"] != one["second"]["reward"]]
    assert moved == [one["task"] for one in found["tasks"]][: len(moved)]
    task = got(client, "/api/task", run="first", task=moved[0] if moved else "test/0", q="step=0")
    assert task["total"] == 1 and task["episodes"][0]["conversation"]
    answer = client.get("/api/compare", params={**query, "name2": "eval-7"})
    assert answer.status_code == 400 and "eval-000010" in answer.json()["error"]


def test_what_doctor_finds_links_to_episodes_that_show_it(client, runs):
    records = [{"step": step, "reward/mean_drawn": 0.5, "rollout/episodes": 32.0, "tokens/truncated": 0.9,
                "rollout/groups_drawn": 40.0} for step in range(1, 8)]  # fmt: skip
    (runs[0].folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    found = {one["kind"]: one for one in got(client, "/api/runs/first/findings")["findings"]}
    link = found["truncation"]["episodes"]
    assert got(client, "/api/runs/first/episodes", kind=link["kind"], q=link["query"], sort=link["sort"])["total"] > 0


def test_every_link_of_a_finding_can_be_followed(run):
    from agentrl.view.findings import EPISODE_LINKS

    for kind, query, sort in EPISODE_LINKS.values():
        run.index.page(kind, query, sort=sort.lstrip("-"))


async def test_a_living_run_is_told_of_as_it_is_written(run):
    ended = threading.Event()

    async def gone():
        return ended.is_set()

    events = run_events(run, gone, 0.0)
    first = json.loads((await anext(events)).removeprefix(b"data: "))
    assert first["summary"]["step"] == 2
    append(run.folder / "metrics.jsonl", {"step": 3, "reward/mean_drawn": 0.75})
    append(run.folder / "episodes.jsonl", hostile_episode() | {"group_id": "g-new"})
    second = json.loads((await anext(events)).removeprefix(b"data: "))
    assert (second["summary"]["step"], second["latest"]["reward/mean_drawn"]) == (3, 0.75)
    assert run.index.page(query="group:g-new").total == 1
    ended.set()
    with pytest.raises(StopAsyncIteration):
        await anext(events)


def test_folders_that_are_no_runs_are_refused(tmp_path, runs_folder):
    (tmp_path / "empty").mkdir()
    for name, said in (("none", "no run 'none'"), (str(tmp_path / "empty"), "is no run")):
        with pytest.raises(UserError, match=said):
            shown_runs([name], runs_folder)
    with pytest.raises(UserError, match="no runs in"):
        shown_runs([], tmp_path / "empty")


def test_two_folders_of_one_name_have_two_keys(runs_folder, tmp_path):
    (tmp_path / "others" / "first").mkdir(parents=True)
    (tmp_path / "others" / "first" / "metrics.jsonl").write_text('{"step": 1}\n')
    found = shown_runs(["first", str(tmp_path / "others" / "first")], runs_folder, tmp_path / "cache")
    assert [run.key for run in found] == ["first", "first-2"]


def test_a_folder_of_an_older_version_is_shown_with_what_it_has(tmp_path):
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 4, "reward": 1.0, "odd": null}\nno json\n{"step": 5}\n{"st')
    (folder / "config.json").write_text("[]")
    run = shown_runs([], tmp_path / "runs", tmp_path / "cache")[0]
    found = run.summary()
    assert found["step"] == 5 and "not all is known" in found["problem"]
    client = TestClient(application([run], keys := Keys()), base_url="http://localhost")
    client.get(f"/?token={keys.token}")
    assert got(client, "/api/runs/old")["config"] == {}
    assert got(client, "/api/runs/old/evaluations") == {"reports": []}
    assert got(client, "/api/runs/old/episodes")["rows"] == []


def test_the_command_serves_the_page_and_says_that_a_port_is_in_use(runs_folder, tmp_path):
    import os
    import re
    import signal

    import httpx

    command = [sys.executable, "-m", "agentrl", "view", "first", "--run-dir", str(runs_folder), "--port"]
    env = {**os.environ, "AGENTRL_CACHE": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True, env=env) as process:
        link = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=\S+", process.stdout.readline())
        with httpx.Client(trust_env=False, follow_redirects=True) as client:
            assert 'id="app"' in client.get(link[0]).text
            assert client.get(f"http://127.0.0.1:{link[1]}/api/runs/first/episodes").json()["rows"]
        second = subprocess.run([*command, link[1]], capture_output=True, text=True, env=env)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert second.returncode == 2
    assert f"port {link[1]} cannot be used" in second.stderr and "Traceback" not in second.stderr
