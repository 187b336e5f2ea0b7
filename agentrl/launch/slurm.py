"""Submits a run as a Slurm job: the same run as on machines without a scheduler, one launcher on each node.

Guarantees: the script is computed from the recipe alone, and ``--dry-run`` prints it; the job's exit code is 0 only if
the run says itself that it ended well, because ``srun`` ends with 0 when a node is lost. Before its time limit or a
preemption the job saves, and is queued again; a job that starts again goes on from its newest checkpoint. After a
failure the script starts the run again from a new checkpoint, ``launch.restarts`` times, and names nodes that are down;
where one of its nodes does not answer it has the job queued again instead, because Slurm then chooses others.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.render import render
from agentrl.launch.machine_recipe import recipe_of_machine, run_folder
from agentrl.launch.run_owner import FILE as OWNER_FILE
from agentrl.launch.slurm_args import arg_problems
from agentrl.train.checkpoint_state import SAVED_FILE, STATE_FILE, STOP_FILE, latest_checkpoint

REFUSED_CODE = 2  # of a launcher that cannot do what the recipe asks for
ANSWER_SECONDS = 120  # for the nodes of a job to answer after a failure

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
{options}
set -u
{setup}
run={run} recipe={recipe}
newest() {{ ls -d "$run"/checkpoints/step-*/{state} 2> /dev/null | tail -n 1; }}
well() {{ grep -q '"code": 0' "$run/{owner}" 2> /dev/null; }}
if [ "${{SLURM_RESTART_COUNT:-0}}" != 0 ] && well; then exit 0; fi  # it was queued again while it ended
if [ -z "$(newest)" ] && [ -e "$run" ]; then  # it ended before its first checkpoint
  mv "$run" "$run.before-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
fi
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it over
trap 'touch "$run/processes/{stop}"' USR1  # save and stop; a signal to srun would reach every process of the step
for left in $(seq {restarts} -1 0); do
  before=$(newest) resume=
  [ -z "$before" ] || resume=--resume
  rm -f "$run/processes/{saved}" "$run/processes/{stop}"  # of the start before
  was=$(cat "$run/{owner}" 2> /dev/null)
  export agentrl_python={python} agentrl_recipe="$recipe" agentrl_resume=$resume
{steps}
  code=0
  while true; do  # a trapped signal ends a wait
    wait $pid
    code=$?
    kill -0 $pid 2> /dev/null || break
  done
{end_others}\
  if [ -e "$run/processes/{saved}" ]; then  # the code is that of whichever task srun ended
    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # Slurm ends this script; its own end would be the job's
  fi
  if well && [ "$(cat "$run/{owner}")" != "$was" ]; then exit 0; fi  # and not that of an earlier start
  [ $code != 0 ] || code=1  # srun ends with 0 when a node is lost
  sinfo -h -N -n "${{SLURM_JOB_NODELIST:-}}" -o "%N is %T" | grep -v -E " (allocated|mixed|idle)$" >&2
  if [ $left = 0 ] || [ $code = {refused} ] || [ "$(newest)" = "$before" ]; then break; fi
  if ! ({answer}) > /dev/null 2>&1; then
    echo "the run failed (code $code), and a node does not answer: the job is queued again, to go on elsewhere" >&2
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
  fi
  echo "the run failed (code $code); it starts again from $(newest)" >&2
done
echo "the run failed (code $code): see above, and $run/logs" >&2
exit $code
"""
_STEP = """\
  srun {where}--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none {kill}{container}bash -c \\
    'exec "$agentrl_python" -m agentrl recipe run "$agentrl_recipe" $agentrl_resume {head}launch.node_rank={rank}' &
  {pid}=$!"""
_ANSWER = "timeout {seconds} srun --overlap {where}--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 true"
_HET = """\
#SBATCH hetjob
#SBATCH --nodes={nodes}
#SBATCH --ntasks={nodes}
#SBATCH --ntasks-per-node=1
{options}"""
_END_OTHERS = """\
  for other in {pids}; do  # they end when the head does
    for _ in $(seq 150); do kill -0 $other 2> /dev/null || break; sleep 0.2; done
    kill $other 2> /dev/null
    wait $other
  done
"""


class SlurmError(UserError):
    """The job cannot be submitted; the message says why."""


@dataclass(frozen=True)
class _Group:
    """Nodes of one kind beside the trainer's.

    Attributes:
        pid: Shell variable of their step's process.
        nodes: Number of nodes.
        args: Options of sbatch where they are a component of their own; empty where they are nodes like the trainer's.
    """

    pid: str
    nodes: int
    args: tuple[str, ...]


def _groups(recipe: Recipe) -> list[_Group]:
    """Returns the nodes beside the trainer's, in the order of their numbers."""
    slurm = recipe.launch.slurm
    found = (
        _Group("workers", recipe.rollout.nodes, slurm.worker_args),
        _Group("servers", recipe.inference.nodes, slurm.server_args),
    )
    return [group for group in found if group.nodes]


def script(recipe: Recipe) -> str:
    """Writes the job's script.

    Args:
        recipe: Recipe as loaded.

    Raises:
        SlurmError: An option of sbatch contradicts the run, or names fewer GPUs than a node needs.
    """
    for problem in arg_problems(recipe):
        raise SlurmError(problem)
    run, slurm, groups = run_folder(recipe), recipe.launch.slurm, _groups(recipe)
    options = [f"#SBATCH {option}" for option in slurm.args]
    if slurm.save_seconds:
        options.append(f"#SBATCH --signal=B:USR1@{slurm.save_seconds}")
    for group in groups:
        if group.args:
            own = "\n".join(f"#SBATCH {option}" for option in group.args)
            options.append(_HET.format(nodes=group.nodes, options=own))
    modules = [f"module load {' '.join(map(shlex.quote, slurm.modules))}"] if slurm.modules else []
    pids = " ".join(f"${group.pid}" for group in groups)
    return _SCRIPT.format(
        name=shlex.quote(f"agentrl-{recipe.name}"),
        nodes=recipe.trainer.nodes + sum(group.nodes for group in groups if not group.args),
        log=shlex.quote(f"{run}.slurm-%j.log"),
        options="\n".join(options),
        setup="\n".join((*modules, *slurm.setup)),
        run=shlex.quote(str(run)),
        recipe=shlex.quote(str(recipe_file(recipe))),
        python="python3" if slurm.container else shlex.quote(sys.executable),
        steps="\n".join(_steps(recipe, groups)),
        answer=" && ".join(
            _ANSWER.format(seconds=ANSWER_SECONDS, where=where, nodes=nodes) for where, nodes in _places(recipe, groups)
        ),
        end_others=_END_OTHERS.format(pids=pids) if groups else "",
        restarts=recipe.launch.restarts,
        saved=SAVED_FILE,
        state=STATE_FILE,
        stop=STOP_FILE,
        owner=OWNER_FILE,
        refused=REFUSED_CODE,
    )


def _places(recipe: Recipe, groups: Sequence[_Group]) -> list[tuple[str, int]]:
    """Returns the options of srun that choose the nodes of each kind, the trainer's first, and their number."""
    trainers = recipe.trainer.nodes
    first = "--het-group=0 " if any(group.args for group in groups) else ""
    beside = any(not group.args for group in groups)
    found = [(first + "--relative=0 " * beside, trainers)]
    relative, component = trainers, 0
    for group in groups:
        if group.args:
            component += 1
            where = f"--het-group={component} "
        else:
            where, relative = f"{first}--relative={relative} ", relative + group.nodes
        found.append((where, group.nodes))
    return found


def _steps(recipe: Recipe, groups: Sequence[_Group]) -> list[str]:
    """Lines that start the launchers: a step for the trainer's nodes, and one for each other kind."""
    trainers, container = recipe.trainer.nodes, _container(recipe)
    head = "launch.head=$SLURM_LAUNCH_NODE_IPADDR " if groups or trainers > 1 else ""  # this script's node: the first
    (first, _), *others = _places(recipe, groups)
    steps = [
        _STEP.format(
            where=first, nodes=trainers, kill="--kill-on-bad-exit=1 ", container=container,
            head=head, rank="$SLURM_NODEID", pid="pid",
        )
    ]  # fmt: skip
    rank = trainers
    for group, (where, nodes) in zip(groups, others, strict=True):
        number = f"$(({rank} + SLURM_PROCID))"  # of the step
        steps.append(
            _STEP.format(where=where, nodes=nodes, kill="", container=container, head=head, rank=number, pid=group.pid)
        )
        rank += nodes
    return steps


def _container(recipe: Recipe) -> str:
    """Options of srun that run a launcher in the recipe's container; empty without one."""
    slurm, here = recipe.launch.slurm, os.getcwd()
    if slurm.container is None:
        return ""
    runs = str(run_folder(recipe).parent)
    mounts = ",".join(f"{folder}:{folder}" for folder in dict.fromkeys((runs, here)))
    own = [f"--container-image={slurm.container}", f"--container-mounts={mounts}", f"--container-workdir={here}"]
    return "".join(f"{shlex.quote(word)} " for word in (*own, *slurm.container_args))


def recipe_file(recipe: Recipe) -> Path:
    """Returns the file beside the run's folder that holds the job's recipe."""
    return run_folder(recipe).with_name(f"{recipe.name}.slurm.yaml")


def submit(recipe: Recipe, *, resume: bool = False) -> tuple[str, str]:
    """Submits the job; returns its number, and the file of its output.

    Args:
        recipe: Recipe as loaded.
        resume: Whether the job goes on with the run of this name, whose last job was cancelled or failed.

    Raises:
        SlurmError: There is no Slurm here, it refuses the job, or the name is taken or has nothing to go on with.
    """
    if shutil.which("sbatch") is None:
        raise SlurmError("launch.type=slurm: there is no sbatch here; run this on a machine of the cluster")
    run = run_folder(recipe)
    if run.exists() and not resume:
        raise SlurmError(f"a run named {recipe.name!r} exists in {run}: continue it with --resume, or choose name=NEW")
    if resume and latest_checkpoint(run / "checkpoints") is None:
        raise SlurmError(f"{run} has no checkpoint to go on from")
    run.parent.mkdir(parents=True, exist_ok=True)
    recipe_file(recipe).write_text(render(recipe_of_machine(recipe), comments=False))
    file = run.with_name(f"{recipe.name}.slurm.sh")
    file.write_text(script(recipe))
    found = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SlurmError(f"sbatch refused the job of {file}: {found.stderr.strip()}")
    job = found.stdout.strip().partition(";")[0]
    return job, f"{run}.slurm-{job}.log"
