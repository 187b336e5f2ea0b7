"""Submits a run as a Slurm job: the same run as on machines without a scheduler, one launcher on each node.

Guarantees: the script is computed from the recipe alone, and ``--dry-run`` prints it; the job's exit code is 0 only if
the run has exported its model, because ``srun`` ends with 0 when a node is lost. Before its time limit or a preemption
the job saves, and is queued again; a job that starts again goes on from its newest checkpoint.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.render import render
from agentrl.launch.machine_recipe import recipe_of_machine, run_folder
from agentrl.train.checkpoint_state import SAVED_FILE, STOP_FILE

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
resume=
if compgen -G "$run/checkpoints/step-*" > /dev/null; then
  resume=--resume
elif [ -e "$run" ]; then  # it ended before its first checkpoint
  mv "$run" "$run.before-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
fi
export agentrl_run="{python} -m agentrl recipe run $recipe $resume"
# a step's SLURM_LAUNCH_NODE_IPADDR is the node of this script: the first one
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c \\
  'exec $agentrl_run {where}launch.node_rank=$SLURM_NODEID' &
pid=$!
trap 'touch "$run/processes/{stop}"' USR1  # save and stop; a signal to srun would reach every process of the step
code=0
while true; do  # a trapped signal ends a wait
  wait $pid
  code=$?
  kill -0 $pid 2> /dev/null || break
done
if [ -e "$run/processes/{saved}" ]; then  # the code is that of whichever task srun ended
  scontrol requeue "$SLURM_JOB_ID" && sleep 600  # Slurm ends this script; its own end would be the job's
elif [ $code = 0 ] && [ ! -e "$run/model/config.json" ]; then
  echo "the run ended without its model: a node was lost" >&2
  exit 1
fi
exit $code
"""


class SlurmError(UserError):
    """The job cannot be submitted; the message says why."""


def script(recipe: Recipe) -> str:
    """Writes the job's script.

    Args:
        recipe: Recipe as loaded.
    """
    run, slurm = run_folder(recipe), recipe.launch.slurm
    options = list(slurm.args)
    if slurm.save_seconds:
        options.append(f"--signal=B:USR1@{slurm.save_seconds}")
    return _SCRIPT.format(
        name=f"agentrl-{recipe.name}",
        nodes=recipe.trainer.nodes,
        log=f"{run}.slurm-%j.log",
        options="\n".join(f"#SBATCH {option}" for option in options),
        setup="\n".join(slurm.setup),
        run=shlex.quote(str(run)),
        recipe=shlex.quote(str(recipe_file(recipe))),
        python=shlex.quote(sys.executable),
        where="launch.head=$SLURM_LAUNCH_NODE_IPADDR " if recipe.trainer.nodes > 1 else "",
        saved=SAVED_FILE,
        stop=STOP_FILE,
    )


def recipe_file(recipe: Recipe) -> Path:
    """Returns the file beside the run's folder that holds the job's recipe."""
    return run_folder(recipe).with_name(f"{recipe.name}.slurm.yaml")


def submit(recipe: Recipe) -> tuple[str, str]:
    """Submits the job; returns its number, and the file of its output.

    Raises:
        SlurmError: There is no Slurm here, or it refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise SlurmError("launch.type=slurm: there is no sbatch here; run this on a machine of the cluster")
    run = run_folder(recipe)
    if run.exists():
        raise SlurmError(f"a run named {recipe.name!r} exists in {run}: choose another name with name=NEW")
    run.parent.mkdir(parents=True, exist_ok=True)
    recipe_file(recipe).write_text(render(recipe_of_machine(recipe), comments=False))
    file = run.with_name(f"{recipe.name}.slurm.sh")
    file.write_text(script(recipe))
    found = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SlurmError(f"sbatch refused the job of {file}: {found.stderr.strip()}")
    job = found.stdout.strip().partition(";")[0]
    return job, f"{run}.slurm-{job}.log"
