"""Every command that README and docs show is executed, with the tiny model in place of a real one."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.config.recipe import TrainerConfig
from agentrl.core.registry import load
from agentrl.launch.supervisor import Supervisor
from agentrl.train.loss import needs_whole_sequences
from tests.cli.test_runs import make_run
from tests.end_to_end import ROOT, command, environment, overrides, run
from tests.launch.test_run import exported
from tests.plan.planned import made_run as made_plan_run
from tests.sim.test_recorded import recorded_run
from tests.train.test_loss import tokens_of

WALK = ROOT / "docs" / "environments.md"  # its commands follow from each other: test_environments_page.py runs them
AGENTS = ROOT / "docs" / "agents.md"  # its commands need its blocks: test_agents_page.py runs them
EVALUATION = ROOT / "docs" / "evaluation.md"  # its commands follow from each other: test_evaluation_page.py runs them
OWN_TESTS = {WALK, AGENTS, EVALUATION}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(set((ROOT / "docs").glob("*.md")) - OWN_TESTS)]
NEEDS_MORE_THAN_A_TEST_HAS = {
    "pip install -e '.[gpu]'": "SGLang needs a GPU and an environment of its own",
}


def shown_commands(documents: list[Path]) -> list[str]:
    """Lines of ``sh`` blocks and indented ``make`` lines, without comments."""
    found: dict[str, None] = {}
    for document in documents:
        text = document.read_text()
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            found |= dict.fromkeys(line.split("  #")[0].strip() for line in block.splitlines() if line.strip())
        indented = re.findall(r"^    (make .*)$", text, re.MULTILINE)
        found |= dict.fromkeys(line.split("  #")[0].strip() for line in indented)
    return list(found)


COMMANDS = shown_commands(DOCUMENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the environment that README shows, and the kind of server of docs/servers.md."""
    made = tmp_path_factory.mktemp("reader")
    (kind,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "servers.md").read_text(), re.DOTALL)
    (made / "my_server.py").write_text(kind)
    shutil.copy(ROOT / "tests" / "acme_server.py", made)
    (loss,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    (made / "off_policy_masking.py").write_text(loss)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 30
    (made / "my_env.py").write_text(block)
    (made / "my_lines").mkdir()
    example = {"prompt": "What is 1 + 1?", "completion": "2"}
    for name in ("train", "test"):
        (made / "my_lines" / f"{name}.jsonl").write_text((json.dumps(example) + "\n") * 8)
    return made


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path) -> Iterator[str]:
    """URL of ``agentrl serve`` on the tiny model."""
    supervisor = Supervisor(folder / "logs")
    ready = folder / "server.json"
    arguments = ["serve", "--engine", "embedded", "--model", str(tiny_model), "--ready-file", str(ready)]
    child = supervisor.start("serve", command(*arguments), env=environment())
    yield supervisor.wait_ready(child, ready, 120.0)["url"]
    supervisor.stop()


def test_the_documents_show_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("make")])
def test_make_knows_the_target(line: str) -> None:
    result = subprocess.run([*shlex.split(line), "-n"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", [c for c in COMMANDS if re.match(r"agentrl recipe (list|show)|agentrl --", c)])
def test_reading_commands_run(line: str, folder: Path) -> None:
    result = run(*shlex.split(line)[1:], cwd=folder)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl recipe run")])
def test_runs_are_planned_as_shown(line: str, tiny_model: Path, folder: Path) -> None:
    """Their settings are accepted; that such runs work is shown by the end-to-end tests."""
    result = run(
        *shlex.split(line)[1:], f"model.name={tiny_model}", "inference.context_length=4000", "--dry-run", cwd=folder
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if "recipe run" in c and "my_env.py" in c])
def test_the_shown_environment_trains(line: str, tiny_model: Path, folder: Path) -> None:
    """With a reward, an advantage, an objective and a trainer by path, as docs/environments.md says they may be."""
    own = [s for s in overrides(tiny_model, folder / "runs", "shown") if not s.startswith("env.id")]
    toys = ROOT / "tests" / "toy_training.py"
    own += [f"reward.id={toys}:judge", "reward.scale=0.5", f"trainer.advantage={toys}:halved"]
    own += [f"trainer.objective={toys}:reinforce", f"trainer.type={toys}:CountingTrainer"]
    result = run(*shlex.split(line)[1:], *own, "trainer.total_steps=1", cwd=folder)
    assert result.returncode == 0, result.stdout
    record = json.loads((folder / "runs" / "shown" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= record["metrics/capitals"] <= 1
    assert {"metrics/brief", "eval/capitals", "train/loss"} <= record.keys()
    assert record["metrics/judged"] == 2.0, "the user's message and the answer"
    assert (folder / "runs" / "shown" / "steps.txt").read_text() == "1"


def test_the_shown_loss_masks_old_bad_sequences_and_shows_its_formula(folder: Path) -> None:
    shown = run("recipe", "show", "arithmetic_grpo", "trainer.objective=off_policy_masking.py:masked", cwd=folder)
    assert "clip(r_t, A), 0 where A < 0" in shown.stdout
    file = str(folder / "off_policy_masking.py")
    config = TrainerConfig.model_validate({"preset": f"{file}:MASKED", "objective": f"{file}:masked"})
    assert (config.aggregation, config.clip_eps_high) == ("token", 0.28) and needs_whole_sequences(config)
    sequences, advantages = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([-1.0, -1, -1, -1, 1, 1])
    behavior = torch.tensor([-1.0] * 6)
    logprobs = torch.tensor([-1.1, -1.1, -1.4, -1.4, -1.4, -1.4])  # 0.1 and 0.4 less likely than when they were sampled
    for age, left_out in ((1, []), (2, [2, 3])):  # the bound is 0.5, and 0.25 for tokens of two versions ago
        versions = torch.full((6,), 5 - age)
        tokens = tokens_of(config, logprobs, behavior, advantages, sequences=sequences, versions=versions, version=5)
        loss, acted = load("objective", config.objective)(tokens)
        assert torch.nonzero(loss == 0).flatten().tolist() == left_out
        assert set(left_out) <= set(torch.nonzero(acted).flatten().tolist())


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl env")])
def test_the_shown_environment_is_checked_and_played(line: str, folder: Path) -> None:
    played = subprocess.run(
        command(*shlex.split(line)[1:]),
        cwd=folder,
        env=environment(),
        input="I LIKE TEA\n",
        capture_output=True,
        text=True,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert "0 errors, 0 warnings" in played.stdout or "reward of the episode: 1" in played.stdout


def test_the_shown_environment_is_evaluated(server: str, folder: Path) -> None:
    (line,) = [c for c in COMMANDS if c.startswith("agentrl eval my_env.py")]
    output = folder / "eval-shown"
    result = run(
        *shlex.split(line)[1:], "--base-url", f"{server}/v1", "--model", "m", "--output", str(output),
        "sampling.max_new_tokens=8", cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0 and "capitals" in result.stdout, result.stdout
    assert json.loads((output / "result.json").read_text())["eval/n"] == 5


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl eval") and "my_env" not in c])
def test_evaluations_run_against_a_server(line: str, server: str, tiny_model: Path, folder: Path) -> None:
    words = shlex.split(line)[1:]
    external = "--base-url" in words
    if external:
        words[words.index("--base-url") + 1] = f"{server}/v1"
    else:
        words += ["--model", str(tiny_model)]
    output = folder / f"eval-{COMMANDS.index(line)}"
    small = ["--n", "3", "--k", "2", "--output", str(output), "sampling.max_new_tokens=8", "inference.threads=1"]
    # The tiny model's context is too short for grade-school problems in bytes.
    small += ["env.id=arithmetic", "env.kwargs={}", "valid_dataset.name=arithmetic", "inference.context_length=512"]
    result = run(*words, *small, cwd=folder)
    assert result.returncode == 0, result.stdout
    assert "accuracy" in result.stdout and "invalid" in result.stdout and "pass@2" in result.stdout
    episodes = [json.loads(e) for e in (output / "eval-episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 6
    assert all(e["trajectories"]["assistant"]["nodes"][-1]["message"]["role"] == "assistant" for e in episodes)
    assert json.loads((output / "result.json").read_text())["eval/n"] == 6


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl chat")])
def test_chats_answer_what_is_piped_in(line: str, server: str, tiny_model: Path, folder: Path) -> None:
    words, external, piped = (
        shlex.split(line)[1:],
        "http" in line,
        "" if "--env" in line or "--recipe" in line else "hi",
    )
    for at, word in enumerate(words):
        if external and word.startswith("http"):
            words[at] = f"{server}/v1" if word.endswith("/v1") else server
        elif words[at - 1] in ("chat", "--model"):
            words[at] = word if word.startswith("-") else str(tiny_model)
    small = ["sampling.max_new_tokens=8", "inference.context_length=512", "inference.threads=1"]
    if "--recipe" in words:  # its tools and examples are too long for the tiny model in bytes
        small += [f"model.name={tiny_model}", "model.chat_template=null", "env.id=arithmetic"]
    result = subprocess.run(
        command(*words, *small), input=f"{piped}\n/quit\n", cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert ("parsed: " if "--tokens" in words else "assistant: ") in result.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl model check")])
def test_a_model_is_checked_as_shown(line: str, tiny_model: Path, folder: Path) -> None:
    words = shlex.split(line)[1:]
    result = run(*words[:2], str(tiny_model), *words[3:], cwd=folder)
    assert result.returncode == 0, result.stdout
    assert "trees" in result.stdout


def test_serve_refuses_a_port_in_use(server: str, tiny_model: Path) -> None:
    (line,) = [c for c in COMMANDS if c.startswith("agentrl serve ")]
    words = shlex.split(line)[1:]
    words[words.index("--model") + 1] = str(tiny_model)
    port = server.rsplit(":", 1)[1]
    words[words.index("--port") + 1] = port
    result = run(*words)
    assert result.returncode == 2
    assert port in result.stdout and "Traceback" not in result.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl bench")])
def test_benchmarks_are_known_by_name(line: str) -> None:
    """They take minutes; ``make test-long`` runs them."""
    name = shlex.split(line)[2]
    assert (ROOT / "agentrl" / "bench" / f"bench_{name}.py").is_file()
    assert "Traceback" not in run("bench", "--help").stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl sim")])
def test_simulations_run_as_shown(line: str, tmp_path: Path) -> None:
    """With few episodes a step; ``runs/mine`` is a recorded run, ``lengths.txt`` a file of lengths."""
    (tmp_path / "lengths.txt").write_text("100\n300\n")
    if "runs/mine" in line:
        recorded_run(tmp_path / "runs" / "mine")
    small = ["rollout.batch_size=2", "rollout.group_size=2", "rollout.max_concurrent=8", "--steps", "1", "--gpus", "2"]
    if "--split" in line:
        small += ["--split", "1+1"]
    result = run(*shlex.split(line)[1:], *small, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "best      1 for inference + 1 for training, rollout.max_staleness=" in result.stdout
    assert ("predicted from its records" in result.stdout) == ("--from" in line)


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl plan")])
def test_plans_are_made_as_shown(line: str, tmp_path: Path) -> None:
    """``runs/mine`` is a recorded run; what a probe measures is tried by tests/plan/test_probe.py."""
    words = shlex.split(line)[1:]
    if "--probe" in words:
        del words[words.index("--probe") :][:2]
    if "--explain" in words:
        made_plan_run(tmp_path / "runs" / "mine")
    result = run(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert ("bottleneck" if "--explain" in words else "a step of") in result.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("scripts/")])
def test_scripts_say_that_there_is_no_gpu(line: str) -> None:
    """What they do where there is one is tried in small by ``tests/bench/test_gpu.py``."""
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(shlex.split(line), cwd=ROOT, capture_output=True, text=True, env=env)
    assert (result.returncode, result.stdout) == (0, "no CUDA device: nothing measured\n"), result.stderr


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl servers")])
def test_server_commands_say_that_no_run_goes_on(line: str, tmp_path: Path) -> None:
    """What they do to a run is shown by the end-to-end tests."""
    result = run(*shlex.split(line)[1:], cwd=tmp_path)
    assert result.returncode == 2
    assert "no run goes on" in result.stdout and "Traceback" not in result.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl runs")])
def test_commands_of_runs_know_their_runs(line: str, tmp_path: Path) -> None:
    """What a resume does to a run is shown by tests/test_kills.py; here it has nothing left to do."""
    for name in ("gsm8k_grpo", "gsm8k_grpo-2"):
        exported(make_run(tmp_path / "runs", name, steps=100), 100)
    result = run(*shlex.split(line)[1:], cwd=tmp_path)
    over = "agentrl runs resume" in line
    assert result.returncode == (2 if over else 0), result.stdout
    assert not over or "has made all its 100 steps" in result.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("agentrl doctor")])
def test_the_doctor_looks_through_a_run(line: str, tmp_path: Path) -> None:
    place = tmp_path / shlex.split(line)[2]
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text(json.dumps({"rollout/episodes": 4.0, "rollout/failed": 3.0}) + "\n")
    result = run(*shlex.split(line)[1:], cwd=tmp_path)
    assert result.returncode == 1
    assert "3 episodes drawn for the step failed" in result.stdout and "not judged" in result.stdout


def test_no_command_is_shown_that_nothing_runs() -> None:
    commands = ("recipe", "env", "eval", "chat", "servers", "serve", "bench", "sim", "plan", "model", "doctor", "runs")
    known = ("make ", "scripts/", "agentrl --", *(f"agentrl {name}" for name in commands))
    unknown = [c for c in COMMANDS if not c.startswith(known) and c not in NEEDS_MORE_THAN_A_TEST_HAS]
    assert unknown == []
