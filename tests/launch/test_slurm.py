"""The job that a run is submitted as; ``make test-cluster`` runs it on a real Slurm."""

import os
import re
import shlex
import signal
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


JOB = ("launch.type=slurm", "launch.device=cpu")


ON_GPUS = ("launch.device=cuda", "inference.engine=sglang", "trainer.nodes=2", "trainer.nproc=8", "inference.nodes=1",
           "inference.servers=2", "inference.tp=2", "rollout.batch_size=16")  # fmt: skip


def recipe(folder: Path, *settings: str) -> Recipe:
    return load_recipe("arithmetic_grpo", [f"launch.run_dir={folder}", "name=mine", *JOB, *settings])


@pytest.mark.parametrize("line", SHOWN)
def test_the_commands_of_the_page_are_understood(line: str) -> None:
    name, *settings = shlex.split(line)[3:]
    assert load_recipe(name, settings).trainer.nodes == 2


def test_the_page_shows_commands() -> None:
    assert len(SHOWN) == 5


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_is_shell_that_starts_one_launcher_on_each_node(tmp_path: Path, nodes: int) -> None:
    text = script(recipe(tmp_path / "a folder", f"trainer.nodes={nodes}", "launch.slurm.args=[--partition=gpu]"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert f"#SBATCH --output='{tmp_path}/a folder/mine.slurm-%j.log'\n" in text
    assert f"#SBATCH --nodes={nodes}\n" in text and "#SBATCH --partition=gpu\n" in text
    started = re.findall(r"srun .*bash", text)
    assert len(started) == 1
    assert f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 " in started[0]
    assert "--kill-on-bad-exit=1 " in started[0]
    assert "launch.node_rank=$SLURM_NODEID" in text
    assert ("launch.head=$SLURM_LAUNCH_NODE_IPADDR" in text) == (nodes == 2)
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "kill -USR1" not in text, "it would reach the controller and the servers too"
    assert "--signal" not in script(recipe(tmp_path, "launch.slurm.save_seconds=0"))


SERVERS = ("trainer.nodes=2", "inference.nodes=3", "inference.servers=6")


def test_the_launchers_of_servers_are_a_step_of_their_own(tmp_path: Path) -> None:
    text = script(recipe(tmp_path, *SERVERS))
    assert "#SBATCH --nodes=5\n" in text and "hetjob" not in text
    trainers, servers = re.findall(r"^  srun .*", text, re.MULTILINE)
    assert "--relative=0 --nodes=2 " in trainers and "--kill-on-bad-exit=1" in trainers
    assert "--relative=2 --nodes=3 " in servers and "--kill-on-bad-exit" not in servers, "the run goes on without one"
    assert "launch.node_rank=$((2 + SLURM_PROCID))" in text


def test_servers_on_a_partition_of_their_own_are_a_component_of_the_job(tmp_path: Path) -> None:
    given = recipe(tmp_path, *SERVERS, "launch.slurm.args=[-p a]", "launch.slurm.server_args=[-p b, --gres=gpu:4]")
    text = script(given)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    first, second = text.split("#SBATCH hetjob\n")
    assert "#SBATCH --nodes=2\n" in first and "#SBATCH -p a\n" in first
    assert second.startswith("#SBATCH --nodes=3\n#SBATCH --ntasks=3\n") and "#SBATCH --gres=gpu:4\n" in second
    assert re.findall(r"^  srun (--het-group=\d)", text, re.MULTILINE) == ["--het-group=0", "--het-group=1"]
    assert re.findall(r"srun --overlap (--het-group=\d)", text) == ["--het-group=0", "--het-group=1"], "asked again"


def test_the_launchers_of_rollout_workers_are_a_step_between_the_others(tmp_path: Path) -> None:
    workers = ("rollout.nodes=2", "rollout.workers=8")
    text = script(recipe(tmp_path, *SERVERS, *workers))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --nodes=7\n" in text
    steps = re.findall(r"^  srun (.*) --ntasks=", text, re.MULTILINE)
    assert steps == ["--relative=0 --nodes=2", "--relative=2 --nodes=2", "--relative=4 --nodes=3"]
    assert re.findall(r"launch.node_rank=(.*)'", text) == [
        "$SLURM_NODEID", "$((2 + SLURM_PROCID))", "$((4 + SLURM_PROCID))",
    ]  # fmt: skip
    apart = script(recipe(tmp_path, *SERVERS, *workers, "launch.slurm.worker_args=[-p cpu]"))
    assert "#SBATCH --nodes=5\n" in apart and "#SBATCH hetjob\n#SBATCH --nodes=2\n" in apart
    steps = re.findall(r"^  srun (.*) --ntasks=", apart, re.MULTILINE)
    assert steps == [
        "--het-group=0 --relative=0 --nodes=2", "--het-group=1 --nodes=2", "--het-group=0 --relative=2 --nodes=3",
    ]  # fmt: skip
    both = script(
        recipe(tmp_path, *SERVERS, *workers, "launch.slurm.worker_args=[-p c]", "launch.slurm.server_args=[-p d]")
    )
    assert both.count("#SBATCH hetjob\n") == 2 and "#SBATCH --nodes=2\n" in both.split("#SBATCH hetjob\n")[0]
    assert re.findall(r"^  srun (--het-group=\d --nodes=\d)", both, re.MULTILINE) == [
        "--het-group=0 --nodes=2", "--het-group=1 --nodes=2", "--het-group=2 --nodes=3",
    ]  # fmt: skip
    asked = re.findall(r"srun --overlap (.*?) --ntasks=", text)
    assert asked == ["--relative=0 --nodes=2", "--relative=2 --nodes=2", "--relative=4 --nodes=3"], "the same nodes"


def test_modules_and_container_are_lines_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["launch.slurm.modules=[cuda/12.8, gcc]", "launch.slurm.container=reg/our image:1"]
    text = script(recipe(tmp_path / "runs", *settings, "launch.slurm.container_args=[--container-mounts=/d:/d]"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "\nmodule load cuda/12.8 gcc\n" in text
    assert f"'--container-image=reg/our image:1' --container-mounts={tmp_path}/runs:{tmp_path}/runs,{tmp_path}" in text
    assert "export agentrl_python=python3 " in text, "the interpreter of the image"


def starts_of(folder: Path, monkeypatch: pytest.MonkeyPatch, starts: list[str]) -> None:
    """Has each start of a run make a checkpoint, say that it ended well, or end with a code."""
    run_dir = folder / "runs" / "mine"
    for number, does in enumerate(starts):
        lines = {"step": f"mkdir -p {run_dir}/checkpoints/step-00000$1; touch $_/state.json", "code": "exit $1"}
        lines["end"] = f"""mkdir -p {run_dir}; echo '{{"code": 0}}' > {run_dir}/owner.json"""
        parts = sorted((part.split() for part in does.split("; ")), key=lambda part: part[0] == "code")
        text = "\n".join(f"set -- {' '.join(part[1:])}; {lines[part[0]]}" for part in parts)
        (folder / f"start-{number}").write_text(text)
    asked = f'if [ "${{@: -1}}" = true ]; then [ ! -e {folder}/node-is-down ]; exit; fi'
    start = f"n=$(ls {folder}/did-* 2> /dev/null | wc -l); touch {folder}/did-$n; . {folder}/start-$n"
    fake(folder, monkeypatch, f"{asked}\n{start}", "srun")
    (folder / "bin" / "sinfo").symlink_to("/bin/true")


def test_a_job_whose_node_does_not_answer_is_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a start on the same nodes would fail."""
    starts_of(tmp_path, monkeypatch, ["step 3; code 1", "step 5; code 0; end"])
    (tmp_path / "node-is-down").touch()
    control = tmp_path / "bin" / "scontrol"
    control.write_text(f"#!/bin/bash\necho $* > {tmp_path}/asked; kill $PPID\n")  # as Slurm ends a script
    control.chmod(stat.S_IRWXU)
    text = script(recipe(tmp_path / "runs", "launch.restarts=2"))
    env = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1"}
    ended = subprocess.run(["bash"], input=text, text=True, env=env, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGTERM and (tmp_path / "asked").read_text() == "requeue 17\n", ended.stderr
    assert "a node does not answer: the job is queued again" in ended.stderr
    assert len(list(tmp_path.glob("did-*"))) == 1


@pytest.mark.parametrize(
    ("starts", "code", "count"),
    [
        (["step 3; code 1", "step 5; code 0; end"], 0, 2),
        (["step 3; code 1", "code 1", "end"], 1, 2),
        (["code 0"], 1, 1),
        (["step 3; code 2"], 2, 1),
        (["code 1"], 1, 1),
        (["step 3; code 9", "step 4; code 9", "step 5; code 9", "step 6; code 0; end"], 9, 3),
    ],
)  # what each start of the run does: a checkpoint, its exit code, whether it says that it ended well
def test_the_script_starts_a_run_again_that_made_a_checkpoint(
    tmp_path: Path, starts: list[str], code: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts_of(tmp_path, monkeypatch, starts)
    text = script(recipe(tmp_path / "runs", "launch.restarts=2"))
    env = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    ended = subprocess.run(["bash"], input=text, text=True, env=env, capture_output=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert len(list(tmp_path.glob("did-*"))) == count, ended.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["launch.slurm.args=[--gres=gpu:4]"], r"has --gres=gpu:4, and node 0 \(trainer ranks\) needs 8 GPUs"),
        (["launch.slurm.args=['--gres=tmp:5,gpu:a100:4']"], "needs 8 GPUs"),
        (["launch.slurm.args=[--gres=gpu]"], "needs 8 GPUs"),
        (["launch.slurm.args=[--gpus-per-node=h100:7]"], "needs 8 GPUs"),
        (["launch.slurm.server_args=['--gres=gpu:2']"], r"server_args has .*node 2 \(servers\) needs 4 GPUs"),
        (["launch.slurm.args=[--nodes=4]"], "has --nodes=4: the number of nodes follows from trainer.nodes"),
        (["launch.slurm.args=[-N 4]"], "has -N 4: "),
        (["launch.slurm.args=[-n16]"], "one task, the launcher"),
        (["launch.slurm.args=[--array=1-3]"], "a job is one run"),
    ],
)
def test_options_of_sbatch_that_contradict_the_run_are_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(SlurmError, match=words):
        script(recipe(tmp_path, *ON_GPUS, *settings))


def test_options_of_sbatch_that_suffice_are_taken(tmp_path: Path) -> None:
    enough = ["launch.slurm.args=['--gres=gpu:8', --nodelist=n1, --network=x]", "launch.slurm.server_args=['-G 4']"]
    assert "--nodelist=n1" in script(recipe(tmp_path, *ON_GPUS, *enough))
    assert "-p x" in script(recipe(tmp_path, *ON_GPUS, "launch.slurm.args=[-p x]")), "Slurm knows the partition's GPUs"
    same = ["launch.slurm.args=['--gpus-per-node=8']", "launch.slurm.server_args=['--gpus-per-node=4']"]
    assert "--gpus-per-node=4" in script(recipe(tmp_path, *ON_GPUS, *same))


@pytest.mark.parametrize(("restarts", "code"), [("0", 2), ("1", 0)])
def test_the_good_end_of_an_earlier_job_is_not_this_ones(
    tmp_path: Path, restarts: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume that is refused leaves the folder as it was, with the record of the run that ended well."""
    starts_of(tmp_path, monkeypatch, ["code 2"])
    run_dir = tmp_path / "runs" / "mine"
    (run_dir / "checkpoints" / "step-000003").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-000003" / "state.json").touch()
    (run_dir / "owner.json").write_text('{"pid": 7, "code": 0}')
    env = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": restarts}
    text = script(recipe(tmp_path / "runs"))
    ended = subprocess.run(["bash"], input=text, text=True, env=env, capture_output=True, check=False)
    assert ended.returncode == code, ended.stderr


def test_paths_with_spaces_reach_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "an environment"
    python.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > '{tmp_path}/given'\n")
    python.chmod(stat.S_IRWXU)
    monkeypatch.setattr("agentrl.launch.slurm.sys.executable", str(python))
    fake(tmp_path, monkeypatch, 'bash -c "${@: -1}"', "srun")
    (tmp_path / "bin" / "sinfo").symlink_to("/bin/true")
    given = recipe(tmp_path / "my runs")
    env = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0"}
    subprocess.run(["bash"], input=script(given), text=True, env=env, capture_output=True, check=False)
    words = ["-m", "agentrl", "recipe", "run", str(recipe_file(given)), "launch.node_rank=0"]
    assert (tmp_path / "given").read_text().splitlines() == words


def test_the_job_runs_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, "echo '17;cluster'")
    given = recipe(tmp_path / "runs", "trainer.nodes=2", "seed=5", "launch.slurm.setup=[module load cuda]")
    assert submit(given) == ("17", str(tmp_path / "runs" / "mine.slurm-17.log"))
    each = load_recipe(str(recipe_file(given)), ["launch.head=10.0.0.5", "launch.node_rank=1"])
    assert each.seed == 5 and each.launch.type == "local" and each.trainer.nodes == 2
    assert "\nmodule load cuda\n" in (tmp_path / "runs" / "mine.slurm.sh").read_text()


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, name: str = "sbatch") -> None:
    """A command of Slurm that does what the lines say."""
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n")
    (folder / "bin" / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_a_refused_job_and_a_taken_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"sbatch refused the job .*invalid partition"):
        submit(recipe(tmp_path / "runs"))
    (tmp_path / "runs" / "mine").mkdir()
    with pytest.raises(SlurmError, match=r"a run named 'mine' exists .*--resume"):
        submit(recipe(tmp_path / "runs"))


def test_a_cancelled_run_is_submitted_again_where_it_has_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, "echo 18")
    checkpoints = tmp_path / "runs" / "mine" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with pytest.raises(SlurmError, match="has no checkpoint to go on from"):
        submit(recipe(tmp_path / "runs"), resume=True)
    (checkpoints / "step-000003").mkdir()
    (checkpoints / "step-000003" / "state.json").write_text("{}")
    assert submit(recipe(tmp_path / "runs"), resume=True)[0] == "18"
    assert "resume=--resume" in (tmp_path / "runs" / "mine.slurm.sh").read_text(), "the script finds it by itself"


def test_without_slurm_the_run_is_refused_and_a_dry_run_shows_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError, match="there is no sbatch here"):
        submit(recipe(tmp_path))
    shown = run("recipe", "run", "arithmetic_grpo", "--dry-run", "name=mine", *JOB, "trainer.nodes=3")
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
