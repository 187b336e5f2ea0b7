"""A whole run with two rollout workers, one of which is killed in the middle of an episode."""

import json
import signal
import subprocess
from pathlib import Path

from agentrl.rollout.journal import read_episodes, valid_outcomes
from tests.end_to_end import ROOT, SECONDS, command, environment, overrides, processes_of


def test_a_killed_worker_costs_a_retry_and_ctrl_c_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    """The environment kills its process with ``kill -9`` at its 12th episode, in the first training batch."""
    settings = [
        "rollout.workers=2",
        f"env.id={ROOT / 'tests' / 'toy.py'}:KillsItsProcess",
        f"env.kwargs.folder={tmp_path}",
        "env.kwargs.at=12",
        "trainer.total_steps=10000",
    ]
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "workers", *settings)),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:  # ends with the process: the deadline is the test runner's
        said.append(line)
        if "step 3/" in line:
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=SECONDS)
    text = "".join(said) + rest
    assert process.returncode == 130, text
    assert processes_of(tmp_path) == []

    run = tmp_path / "workers"
    trained = [one for one in valid_outcomes(run) if one["outcome"] == "trained"]
    draws = sorted(one["draw"] for one in trained if one["step"] < 3)
    assert draws == list(range(12)), "each draw is trained once, and none is lost"
    assert {one["outcome"] for one in valid_outcomes(run)} <= {"trained", "cancelled"}
    first = [one for one in read_episodes(run / "episodes.jsonl") if int(one.group_id[1:]) < 12]
    assert sorted((int(one.group_id[1:]), one.index) for one in first) == [(g, i) for g in range(12) for i in range(4)]
    assert not any(one.failed for one in first)
    log = (run / "logs" / "controller.log").read_text()
    assert "is lost, with" in log and "Traceback" not in log
    assert "was killed by SIGKILL; it is started again" in text
    assert {path.name for path in (run / "logs").glob("worker-*.log")} == {"worker-0.log", "worker-1.log"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(one["rollout/failed"] == 0 for one in records if "rollout/failed" in one)
