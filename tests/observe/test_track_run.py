"""What a run writes reaches its trackers: once, in order, whatever one of them does."""

import json
import os
import re
import signal
import struct
import subprocess
import sys

import pytest

from agentrl.bench.made_run import make_run
from agentrl.observe import track_run, trackers
from agentrl.observe.track_run import Follower, sample_rows
from tests.view.conftest import HOSTILE, append, hostile_episode


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self, fail_at=None):
        self.steps, self.tables, self.closed, self.fail_at = [], [], 0, fail_at

    def metrics(self, step, values):
        if step == self.fail_at:
            raise ConnectionError("no network")
        self.steps.append((step, values))

    def episodes(self, step, rows):
        self.tables.append((step, rows))

    def close(self):
        self.closed += 1


@pytest.fixture
def run_dir(tmp_path):
    folder = make_run(tmp_path / "run", 64)
    append(folder / "episodes.jsonl", hostile_episode())
    return folder


def test_every_record_is_sent_once_and_in_order(run_dir):
    kept = Kept()
    follower = Follower(run_dir, {"kept": kept})
    follower.send()
    follower.send()
    append(run_dir / "metrics.jsonl", {"step": 3, "time": 1.0, "reward/mean_drawn": 0.5, "odd": None, "flag": True})
    follower.close()
    written = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in kept.steps] == [one["step"] for one in written]
    assert kept.steps[-1] == (3, {"reward/mean_drawn": 0.5})
    assert kept.closed == 1


def test_a_tracker_that_fails_is_left_out_and_the_others_get_all(run_dir, caplog):
    kept, failing = Kept(), Kept(fail_at=1)
    follower = Follower(run_dir, {"failing": failing, "kept": kept})
    follower.close()
    assert len(kept.steps) == 3 and kept.closed == 1
    assert len(failing.steps) == 1 and failing.closed == 0
    assert "tracker failing failed" in caplog.text and "no network" in caplog.text


def test_a_table_has_the_newest_episodes(run_dir):
    rows = sample_rows(run_dir / "episodes.jsonl", 5)
    assert len(rows) == track_run.SAMPLES and rows[-1]["answer"] == HOSTILE
    assert rows[0]["question"].startswith("What is") and rows[0]["tokens"] > 0
    assert sample_rows(run_dir / "none.jsonl", 5) == []


def test_settings_are_sent_without_secrets(run_dir, monkeypatch):
    config = {"name": "run", "agent": {"kwargs": {"api_key": "sk-123456789"}}, "sampling": {"max_new_tokens": 7}}
    (run_dir / "config.json").write_text(json.dumps(config))
    seen = {}
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda name, folder, settings: seen.update(settings) or Kept())
    assert list(track_run.started(["wandb"], run_dir)) == ["wandb"]
    assert seen["agent"]["kwargs"]["api_key"] == "[redacted]" and seen["sampling"]["max_new_tokens"] == 7


def test_one_that_cannot_be_started_is_left_out(run_dir, monkeypatch, caplog):
    def refuse(name, folder, settings):
        raise RuntimeError("no account")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuse)
    assert track_run.started(["wandb"], run_dir) == {}
    assert "no account" in caplog.text


@pytest.mark.parametrize("resumed", [False, True])
def test_the_process_sends_the_rest_when_it_is_told_to_end(run_dir, tmp_path, resumed):
    """A tracker of a resumed run waits until the records of repeated steps are taken out."""
    program = f"""
import sys
from pathlib import Path
from agentrl.observe import track_run, trackers
from agentrl.observe.sinks import MetricsWriter
class File:
    def __init__(self, name, folder, settings):
        self.file = open({str(tmp_path / "sent")!r}, "w", buffering=1)
        if {resumed}:
            MetricsWriter(folder, tensorboard=False).void_after(0)
    def metrics(self, step, values): self.file.write(f"{{step}}\\n")
    def episodes(self, step, rows): pass
    def close(self): self.file.write("closed\\n")
trackers.TRACKERS["wandb"] = File
track_run.main({os.getpid()}, Path({str(run_dir)!r}), ["wandb"])
"""
    if not resumed:
        written = (run_dir / "metrics.jsonl").read_bytes()
        (run_dir / "metrics.jsonl").unlink()
    process = subprocess.Popen([sys.executable, "-c", program])
    sent = tmp_path / "sent"
    if not resumed:
        while process.poll() is None and not sent.is_file():
            os.sched_yield()
        (run_dir / "metrics.jsonl").write_bytes(written)
    while process.poll() is None and (not sent.is_file() or ("0" if resumed else "2") not in sent.read_text()):
        os.sched_yield()
    append(run_dir / "metrics.jsonl", {"step": 3, "a": 1.0})
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert sent.read_text().split() == (["0", "3", "closed"] if resumed else ["0", "1", "2", "3", "closed"])


NAMES = {"step": 1, "reward/mean_drawn": 0.25, "mismatch/kl/age_2+": 0.5, "eval/pass@4": 0.75}


@pytest.fixture
def offline(run_dir, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("WANDB_", "TRACKIO_", "MLFLOW_", "SWANLAB_")):
            monkeypatch.delenv(name)
    append(run_dir / "metrics.jsonl", {**NAMES, "step": 11})

    place = run_dir.parent / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)

    def send(name):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[{name}]'")
        # a process of its own, as a run has: these packages keep threads and global state
        command = [sys.executable, "-m", "agentrl.observe.track_run", "0", str(run_dir), name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
        assert not list(place.iterdir()), "all is in the run's folder"
        return run_dir

    return send


def test_wandb_gets_all_offline(offline):
    folder = offline("wandb")
    file = next((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    data = file.read_bytes()
    for text in (b"reward/mean_drawn", b"eval/pass@4", b"trainer", b"episodes"):
        assert text in data
    assert list((folder / "wandb").glob("offline-run-*/files/media/table/*.json"))


def test_mlflow_gets_all_offline(offline):
    folder = offline("mlflow")
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    run = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])[0]
    assert run.data.metrics["eval/pass-4"] == 0.75 and run.data.metrics["mismatch/kl/age_2-"] == 0.5
    assert [one.step for one in client.get_metric_history(run.info.run_id, "reward/mean_drawn")] == [1, 2, 11]
    assert run.data.params["trainer.advantage"] == "group" and run.info.status == "FINISHED"
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["episodes.json"]


def test_trackio_gets_all_offline(offline):
    import sqlite3

    folder = offline("trackio")
    file = next((folder / "trackio").glob("*.db"))
    with sqlite3.connect(file) as db:
        rows = [json.loads(text) for (text,) in db.execute("SELECT metrics FROM metrics ORDER BY id")]
    db.close()
    found = {name: value for row in rows for name, value in row.items()}
    assert found["eval/pass@4"] == 0.75 and "episodes" in found


def test_swanlab_gets_all_offline(offline):
    folder = offline("swanlab")
    files = [file for file in (folder / "swanlab").rglob("*") if file.is_file()]
    data = b"".join(file.read_bytes() for file in files)
    for text in (b"reward/mean_drawn", b"episodes"):
        assert text in data


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_run_that_goes_on_is_sent_whole_once_more(offline, run_dir, name):
    """wandb/wandb#4624, SwanHubX/SwanLab#1318: of a resumed run one of the two parts was lost."""
    config = {f"key {at}@": {"inner": "v" * 9000 if at == 7 else at, "none": None, "list": [1]} for at in range(80)}
    (run_dir / "config.json").write_text(json.dumps(config))  # more keys, letters and text than MLflow takes at once
    offline(name)
    append(run_dir / "metrics.jsonl", {**NAMES, "step": 12, "reward/mean_drawn": None, "reward/largest": 1e308})
    folder = offline(name)
    steps = SENT[name](folder)
    assert len(steps) == 2 and steps[1] == {*steps[0], 12}, steps


def _wandb_steps(folder):
    from wandb.proto import wandb_internal_pb2 as messages

    found = []
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda one: one.stat().st_mtime_ns):
        steps = set()
        for data in _log_records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            items = record.history.item if record.WhichOneof("record_type") == "history" else ()
            steps |= {int(json.loads(one.value_json)) for one in items if "step" in (one.key, *one.nested_key)}
        found.append(steps)
    return found


def _log_records(data: bytes):
    """Records of a log in LevelDB's format, behind wandb's own seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield whole
            whole = b""


def _mlflow_steps(folder):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("agentrl").experiment_id
    runs = client.search_runs([experiment], order_by=["attributes.start_time ASC"])
    assert all(len(run.data.params) == 240 for run in runs)
    history = [client.get_metric_history(run.info.run_id, "eval/pass-4") for run in runs]
    return [{one.step for one in metrics} for metrics in history]


def _trackio_steps(folder):
    import sqlite3

    with sqlite3.connect(next((folder / "trackio").glob("*.db"))) as db:
        runs = [run for (run,) in db.execute("SELECT run_id FROM metrics GROUP BY run_id ORDER BY min(id)")]
        found = [{step for (step,) in db.execute("SELECT step FROM metrics WHERE run_id = ?", (run,))} for run in runs]
    db.close()
    return found


def _swanlab_steps(folder):
    """In the runs' records (protobuf), a number's step is the field behind the name of its metric."""
    files = sorted((folder / "swanlab").glob("run-*/run-*.swanlab"), key=lambda one: one.stat().st_mtime_ns)
    return [{step[0] for step in re.findall(rb"eval/pass@4\x10(.)\x18", file.read_bytes())} for file in files]


SENT = {"wandb": _wandb_steps, "mlflow": _mlflow_steps, "trackio": _trackio_steps, "swanlab": _swanlab_steps}
