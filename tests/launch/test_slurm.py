"""The job that a run is submitted as; ``make test-cluster`` runs it on a real Slurm."""

import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.launch.slurm import SlurmError, recipe_file, script, submit
from tests.end_to_end import ROOT, run

PAGE = (ROOT / "docs" / "machines.md").read_text()
SHOWN = [line.split("  #")[0].strip() for line in PAGE.splitlines() if line.startswith("agentrl recipe run")]


def recipe(folder: Path, *settings: str) -> Recipe:
    return load_recipe("arithmetic_grpo", [f"launch.run_dir={folder}", "name=mine", "launch.type=slurm", *settings])


@pytest.mark.parametrize("line", SHOWN)
def test_the_commands_of_the_page_are_understood(line: str) -> None:
    name, *settings = shlex.split(line)[3:]
    assert load_recipe(name, settings).trainer.nodes == 2


def test_the_page_shows_commands() -> None:
    assert len(SHOWN) == 4


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_is_shell_that_starts_one_launcher_on_each_node(tmp_path: Path, nodes: int) -> None:
    text = script(recipe(tmp_path / "a folder", f"trainer.nodes={nodes}", "launch.slurm.args=[--partition=gpu]"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert f"#SBATCH --nodes={nodes}\n" in text and "#SBATCH --partition=gpu\n" in text
    assert f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1" in text
    assert "launch.node_rank=$SLURM_NODEID" in text
    assert ("launch.head=$SLURM_LAUNCH_NODE_IPADDR" in text) == (nodes == 2)
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "kill -USR1" not in text, "it would reach the controller and the servers too"
    assert "--signal" not in script(recipe(tmp_path, "launch.slurm.save_seconds=0"))


def test_the_job_runs_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, "echo '17;cluster'")
    given = recipe(tmp_path / "runs", "trainer.nodes=2", "seed=5", "launch.slurm.setup=[module load cuda]")
    assert submit(given) == ("17", str(tmp_path / "runs" / "mine.slurm-17.log"))
    each = load_recipe(str(recipe_file(given)), ["launch.head=10.0.0.5", "launch.node_rank=1"])
    assert each.seed == 5 and each.launch.type == "local" and each.trainer.nodes == 2
    assert "\nmodule load cuda\n" in (tmp_path / "runs" / "mine.slurm.sh").read_text()


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """An ``sbatch`` that does what the lines say."""
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text(f"#!/bin/sh\n{lines}\n")
    (folder / "bin" / "sbatch").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_a_refused_job_and_a_taken_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"sbatch refused the job .*invalid partition"):
        submit(recipe(tmp_path / "runs"))
    (tmp_path / "runs" / "mine").mkdir()
    with pytest.raises(SlurmError, match="a run named 'mine' exists"):
        submit(recipe(tmp_path / "runs"))


def test_without_slurm_the_run_is_refused_and_a_dry_run_shows_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError, match="there is no sbatch here"):
        submit(recipe(tmp_path))
    shown = run("recipe", "run", "arithmetic_grpo", "--dry-run", "name=mine", "launch.type=slurm", "trainer.nodes=3")
    assert shown.returncode == 0, shown.stdout
    assert "on each of 3 machines" in shown.stdout and "#SBATCH --nodes=3" in shown.stdout


@pytest.mark.parametrize(
    ("setting", "words"),
    [("launch.head=a", "it cannot be set"), ("launch.node_rank=1", "it cannot be set")],
)
def test_what_the_job_decides_is_refused(tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe(tmp_path, setting)


def test_a_section_without_its_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("launch.slurm does nothing with launch.type=local")):
        load_recipe("arithmetic_grpo", ["launch.slurm.save_seconds=5"])
