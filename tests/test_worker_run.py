"""A whole run with two rollout workers, one of which is killed in the middle of an episode."""

import signal
import subprocess
from pathlib import Path

import pytest

from agentrl.launch.run_folders import check_journal, run_info
from agentrl.rollout.journal import read_episodes
from agentrl.rollout.journal_proof import valid_outcomes
from tests.end_to_end import ROOT, SECONDS, command, environment, metrics, overrides, processes_of, run


@pytest.mark.long
def test_a_killed_worker_costs_a_retry_and_ctrl_c_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    """The environment kills its process with ``kill -9`` at its 12th episode, in the first training batch."""
    settings = [
        "rollout.workers=2",
        f"env.id={ROOT / 'tests' / 'toy.py'}:KillsItsProcess",
        f"env.kwargs.folder={tmp_path}",
        "env.kwargs.at=12",
        "trainer.total_steps=10000",
        "trainer.save_every=2",
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

    folder = tmp_path / "workers"
    trained = [one for one in valid_outcomes(folder) if one["outcome"] == "trained"]
    draws = sorted(one["draw"] for one in trained if one["step"] < 3)
    assert draws == list(range(12)), "each draw is trained once, and none is lost"
    assert {one["outcome"] for one in valid_outcomes(folder)} <= {"trained", "cancelled"}
    first = [one for one in read_episodes(folder / "episodes.jsonl") if int(one.group_id[1:]) < 12]
    whole = [(int(one.group_id[1:]), one.index) for one in first if not one.failed]
    assert sorted(whole) == [(g, i) for g in range(12) for i in range(4)]
    lost = [one for one in first if one.failed]
    assert lost and all(one.retried and one.stop_reason == "worker_lost" for one in lost)
    log = (folder / "logs" / "controller.log").read_text()
    assert "is lost, with" in log and "Traceback" not in log
    assert "was killed by SIGKILL; it is started again" in text
    assert {path.name for path in (folder / "logs").glob("worker-*.log")} == {"worker-0.log", "worker-1.log"}
    records = [one for one in metrics(folder) if "rollout/failed" in one]
    assert all(one["rollout/failed"] == 0 and one["rollout/controller_cpu"] > 0 for one in records)
    assert sum(one["rollout/retried"] for one in records) == len(lost)

    resumed = run("runs", "resume", "workers", "trainer.total_steps=5", "--run-dir", str(tmp_path))
    assert resumed.returncode == 0, resumed.stdout
    proof = check_journal(run_info(folder))
    assert proof.resumes == 1 and proof.steps == 5 and proof.outcomes["trained"] == 20
    assert processes_of(tmp_path) == []
