"""The main path through all real processes: launcher, server, controller, torchrun ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.core.weight_manifest import SHM, SHM_PREFIX
from agentrl.launch.supervisor import Supervisor
from agentrl.observe.metric_glossary import entry_of
from tests.end_to_end import SECONDS, command, environment, metrics, overrides, processes_of, run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def both(tiny_model: Path, runs: Path) -> Path:
    """Two finished runs that went on at the same time and must not have met: one rank, and the same on two."""
    processes = [
        subprocess.Popen(
            command("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, runs, name, *more)),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, more in (("one", ["trainer.save_every=2", "logging.record=true"]), ("two", ["trainer.nproc=2"]))
    ]  # fmt: skip
    for process in processes:
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
        assert "before" in output and "after" in output
    return runs


@pytest.fixture(scope="module")
def one_rank(both: Path) -> Path:
    """The run on one rank."""
    return both / "one"


@pytest.fixture(scope="module")
def two_ranks(both: Path) -> Path:
    """The run on two ranks."""
    return both / "two"


def test_three_updates_leave_all_outputs(one_rank: Path) -> None:
    for name in (
        "config.json",
        "metrics.jsonl",
        "episodes.jsonl",
        "eval-episodes.jsonl",
        "journal.jsonl",
        "reward.png",
    ):
        assert (one_rank / name).stat().st_size > 0, name
    assert list((one_rank / "tensorboard").iterdir())
    assert {p.name for p in (one_rank / "logs").iterdir()} == {"server-0.log", "controller.log", "trainer.log"}
    records = metrics(one_rank)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert "eval/accuracy" in records[0] and "eval/accuracy" in records[3]
    names = {name for record in records for name in record} - {"step", "time"}
    assert sorted(name for name in names if entry_of(name) is None) == [], "not in the glossary"
    assert json.loads((one_rank / "about.json").read_text())["starts"][0]["command"]
    assert len((one_rank / "episodes.jsonl").read_text().splitlines()) >= 3 * 4 * 4


def test_a_replay_gives_the_same_episodes_and_the_same_update(one_rank: Path) -> None:
    whole = run("replay", str(one_rank))
    assert whole.returncode == 0, whole.stdout
    assert whole.stdout.count("16 episodes, 16 the same\n  advantages the same\n") == 3
    first = json.loads(run("replay", str(one_rank), "--step", "1", "--json").stdout.splitlines()[-1])
    then, now = first["update"]["train/loss"]["recorded"], first["update"]["train/loss"]["now"]
    assert first["same"] and then == pytest.approx(now, rel=1e-4) and then != 0


def test_a_replay_shows_the_first_token_that_differs(one_rank: Path, tmp_path: Path) -> None:
    other = shutil.copytree(one_rank, tmp_path / "other", ignore=shutil.ignore_patterns("model", "checkpoints"))
    config = json.loads((other / "config.json").read_text())
    config["model"]["chat_template"] = "chatml_tools"
    (other / "config.json").write_text(json.dumps(config))
    result = run("replay", str(other), "--step", "2")
    assert result.returncode == 1, result.stdout
    assert "16 episodes, 0 the same" in result.stdout and "request 0: token 1 of the prompt" in result.stdout
    recorded, now = re.findall(r"(?:recorded|now) +(.*)", result.stdout)[:2]
    assert recorded.startswith("...<|im_start|>[") and now.startswith("...<|im_start|>[") and recorded != now
    assert "the run has no checkpoint after step 1" in result.stdout


def test_two_machines_train_what_two_ranks_of_one_do(two_ranks: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Launchers that meet as on hosts of their own, one for the server, one for a rollout worker, the head last."""
    apart = ["trainer.nodes=2", "inference.nodes=1", "rollout.nodes=1", "rollout.workers=1", "launch.head=127.0.0.1"]
    settings = overrides(tiny_model, tmp_path, "apart", *apart)
    processes = [
        subprocess.Popen(
            command("recipe", "run", "arithmetic_grpo", *settings, f"launch.node_rank={rank}"),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (3, 2, 1, 0)
    ]  # fmt: skip
    for process in processes:
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
    apart, together = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "apart", two_ranks))
    for name, tensor in together.items():
        torch.testing.assert_close(apart[name], tensor, rtol=1e-4, atol=1e-5)
    assert {"trainer-1.log", "server-0.log", "worker-0.log"} <= {
        file.name for file in (tmp_path / "apart" / "logs").iterdir()
    }
    secret = json.loads((tmp_path / "apart" / "processes" / "secret.json").read_text())["secret"]
    assert not [file for file in tmp_path.rglob("*.log") if secret in file.read_text(errors="replace")]
    assert processes_of(tmp_path) == []


def test_the_export_is_a_model_that_transformers_loads_and_that_has_changed(one_rank: Path, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(one_rank / "model")
    tokenizer = AutoTokenizer.from_pretrained(one_rank / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_tensors="pt", return_dict=True)
    assert model.generate(**ids, max_new_tokens=2).shape[1] == ids["input_ids"].shape[1] + 2
    before, after = load_file(tiny_model / "model.safetensors"), load_file(one_rank / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_ratio_is_one_on_policy_and_every_token_has_its_version(one_rank: Path) -> None:
    records = metrics(one_rank)[1:]
    assert all(r["mismatch/ratio_max"] < 1e-4 for r in records), "max_staleness=0: each step is on-policy"
    assert all(r["train/tokens"] > 0 and r["train/grad_norm"] > 0 for r in records)
    assert all(r["staleness/max"] == 0 for r in records)
    episodes = [json.loads(line) for line in (one_rank / "episodes.jsonl").read_text().splitlines()]
    versions = {v for e in episodes for n in e["trajectories"]["assistant"]["nodes"] for v in n["versions"]}
    assert versions == {-1, 0, 1, 2}


def test_two_ranks_give_the_parameters_of_one(one_rank: Path, two_ranks: Path) -> None:
    one, two = (load_file(p / "model" / "model.safetensors") for p in (one_rank, two_ranks))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
    first, second = metrics(one_rank)[1:], metrics(two_ranks)[1:]
    assert all(r["ranks/slowest"] in (0, 1) and r["ranks/slowdown"] >= 1 for r in second)
    assert [r["reward/mean_drawn"] for r in first] == pytest.approx([r["reward/mean_drawn"] for r in second])
    assert [r["train/loss"] for r in first] == pytest.approx([r["train/loss"] for r in second], abs=1e-4)


def test_every_task_of_a_batch_is_journalled_once(one_rank: Path) -> None:
    records = [json.loads(line) for line in (one_rank / "journal.jsonl").read_text().splitlines()]
    trained = [(r["step"], r["draw"]) for r in records if r["outcome"] == "trained"]
    assert [step for step, _ in trained] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({draw for _, draw in trained}) == 12


def test_a_run_resumes_from_its_checkpoint(one_rank: Path, tiny_model: Path, runs: Path) -> None:
    more = overrides(tiny_model, runs, "one", "trainer.total_steps=5")
    refused = run("recipe", "run", "arithmetic_grpo", *more)
    assert refused.returncode != 0
    assert "--resume" in refused.stdout and "name=" in refused.stdout
    result = run("recipe", "run", "arithmetic_grpo", *more, "--resume")
    assert result.returncode == 0, result.stdout
    records = metrics(one_rank)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4, 5]
    assert records[4]["mismatch/ratio_max"] < 1e-4, "the server did not get the resumed weights"
    draws = [json.loads(line) for line in (one_rank / "journal.jsonl").read_text().splitlines()]
    assert len({r["draw"] for r in draws if r["outcome"] == "trained"}) == 20


def test_ctrl_c_leaves_no_process_and_no_shared_memory(tiny_model: Path, runs: Path) -> None:
    shared_before = {p.name for p in SHM.glob(f"{SHM_PREFIX}*")}
    arguments = overrides(tiny_model, runs, "stopped", "trainer.total_steps=10000")
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *arguments),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:  # ends with the process: the deadline is the test runner's
        lines.append(line)
        if "step 2/" in line:
            assert len(processes_of(runs / "stopped")) >= 3
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, "".join(lines) + rest
    assert "Traceback" not in rest
    assert "Traceback" not in (runs / "stopped" / "logs" / "controller.log").read_text()
    assert processes_of(runs / "stopped") == []
    assert {p.name for p in SHM.glob(f"{SHM_PREFIX}*")} <= shared_before


@pytest.mark.long
def test_a_killed_launcher_takes_its_children_along(tiny_model: Path, runs: Path) -> None:
    arguments = overrides(tiny_model, runs, "killed", "trainer.total_steps=10000")
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *arguments),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "step 1/" in line:
            break
    children = processes_of(runs / "killed")
    process.kill()
    process.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while any(child.is_running() and child.status() != "zombie" for child in children):
        assert time.monotonic() < deadline, [c.cmdline() for c in children if c.is_running()]
        time.sleep(0.1)  # processes of another session end without telling us: there is nothing else to wait on


@pytest.mark.long
def test_the_run_goes_on_without_a_server_that_was_killed(tiny_model: Path, runs: Path) -> None:
    more = ("inference.servers=2", "trainer.total_steps=8", "inference.probe_seconds=0.5")
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, runs, "fewer", *more)),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "step 2/" in line:
            access = json.loads((runs / "fewer" / "processes" / "server-0.json").read_text())
            os.kill(access["pid"], signal.SIGKILL)
            break
    rest, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, "".join(lines) + rest
    assert "the run continues, although server-0 was killed by SIGKILL" in rest
    records = metrics(runs / "fewer")
    assert [r["step"] for r in records] == list(range(9))
    assert all(r["mismatch/ratio_max"] < 1e-4 for r in records[1:]), "stale weights were sampled from"
    assert records[-1]["eval/invalid"] == 0


def test_servers_are_listed_and_added_while_a_run_goes_on(tiny_model: Path, runs: Path) -> None:
    """Weights are broadcast: the server that joins has one version come by file, and is in the group from then on."""
    supervisor = Supervisor(runs / "joining-logs")
    ready = runs / "joining.json"
    arguments = ["serve", "--engine", "embedded", "--model", str(tiny_model), "--ready-file", str(ready)]
    arguments += ["--dtype", "float32"]
    joining = supervisor.start("serve", command(*arguments), env=environment())
    more = ("trainer.total_steps=10000", "weights.transport=broadcast")
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, runs, "more", *more)),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        url = supervisor.wait_ready(joining, ready, SECONDS)["url"]
        assert process.stdout is not None
        for line in process.stdout:
            if "step 1/" in line:
                break
        where = ("--run", "more", "--run-dir", str(runs))
        added = run("servers", "add", url, *where)
        assert added.returncode == 0 and added.stdout.count("serving") == 2, added.stdout
        for line in process.stdout:  # the next push must reach the new server as well
            if (found := re.search(r"\] step (\d+)/", line)) and int(found[1]) >= 4:
                break
        version = int(httpx.get(f"{url}/model_info", timeout=SECONDS).json()["weight_version"])
        assert version >= 3
        assert "could not be broadcast" not in (runs / "more" / "logs" / "trainer.log").read_text()
        assert run("servers", "add", url, *where).returncode == 2
        removed = run("servers", "remove", url, *where)
        assert removed.returncode == 0 and "leaving" in removed.stdout, removed.stdout
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
        supervisor.stop()
    assert run("servers", "list", *where).returncode == 2, "the run is over"


def test_an_external_server_that_is_not_there_is_one_message(tiny_model: Path, runs: Path) -> None:
    more = ("inference.urls=[http://127.0.0.1:9]",)
    result = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, runs, "nobody", *more))
    assert result.returncode == 1
    assert "http://127.0.0.1:9/ready: ClientConnectorError" in result.stdout
    assert "Traceback" not in result.stdout


def test_prompts_that_do_not_fit_are_refused_with_both_numbers_while_the_servers_load(
    tiny_model: Path, runs: Path
) -> None:
    more = ("inference.context_length=20", "rollout.max_failure_rate=1.0")
    result = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, runs, "narrow", *more))
    assert result.returncode == 2
    (line,) = [line for line in (result.stdout + (result.stderr or "")).splitlines() if "does not fit" in line]
    assert re.search(r"prompt of \d+ tokens does not fit inference\.context_length=20", line)
    assert not (runs / "narrow").exists() and "Traceback" not in result.stdout


def test_a_model_without_chat_template_is_refused_before_anything_starts(tiny_model: Path, runs: Path) -> None:
    bare = runs / "bare-model"
    shutil.copytree(tiny_model, bare)
    (bare / "chat_template.jinja").unlink()
    result = run("recipe", "run", "arithmetic_grpo", *overrides(bare, runs, "bare"))
    assert result.returncode == 2
    assert "chat template" in result.stdout and "Traceback" not in result.stdout
    assert not (runs / "bare").exists()


def test_a_failing_server_ends_the_run_with_its_log(tiny_model: Path, runs: Path) -> None:
    result = run(
        "recipe", "run", "arithmetic_grpo", *overrides(tiny_model, runs, "broken", "inference.args=[--no-such-flag]")
    )
    assert result.returncode == 1
    assert "server-0" in result.stdout and "--no-such-flag" in result.stdout
    assert processes_of(runs / "broken") == []


def test_nothing_heavy_is_imported_by_the_launcher_for_help() -> None:
    code = "import sys, agentrl.cli.main; print(sorted({'torch', 'transformers', 'openai'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment()).strip() == "[]"
