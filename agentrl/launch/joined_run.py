"""Another machine of a run: it runs trainer ranks, and nothing else.

Guarantees: it ends when its ranks end, and they end when the head's do or when the head is gone; however it ends, no
process of it remains.
"""

import signal
from pathlib import Path

from rich.console import Console

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED
from agentrl.host.cpu_env import CPU_ENV
from agentrl.host.stop_signals import STOP_SIGNAL_CODE
from agentrl.launch import commands
from agentrl.launch.commands import Meeting
from agentrl.launch.machines import collective_env, join
from agentrl.launch.needed_packages import needed_packages, require_packages
from agentrl.launch.servers import find_model
from agentrl.launch.supervisor import ChildFailed, Supervisor


def join_run(recipe: Recipe, console: Console) -> int:
    """Waits for the head of a run and runs this machine's ranks; returns the exit code.

    Args:
        recipe: Recipe as loaded, with ``launch.node_rank`` above 0; what runs is the head's.
        console: Console to print to.

    Raises:
        MachineError: The head does not answer in time.
    """
    require_packages(needed_packages(recipe))
    run_dir, rank = Path(recipe.launch.run_dir) / recipe.name, recipe.launch.node_rank

    def say(text: str) -> None:
        console.print(f"node {rank} waits: {text}", highlight=False, markup=False, soft_wrap=True)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # of the whole job: the head's trainer decides
    try:
        theirs, model, head = join(recipe, run_dir, lambda one: find_model(one, console).path, say)
        supervisor = Supervisor(run_dir / "logs")
        meeting = Meeting(head.address, head.port, rank)
        if theirs.trainer.type in SUPERVISED:
            ready = run_dir / "processes" / f"trainer-{rank}.json"
            command = commands.examples_trainer(theirs, model, run_dir, ready, head.resume, meeting)
        else:
            command = commands.trainer(theirs, model, run_dir, "", head.resume, meeting)
        try:
            console.print(f"node {rank} of the run {run_dir} on {head.machine.host}", highlight=False, markup=False)
            env = {**CPU_ENV, **collective_env(head.address), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            supervisor.wait([supervisor.start(f"trainer-{rank}", command, env=env)], lambda: None)
        finally:
            supervisor.stop()
    except KeyboardInterrupt:
        console.print("\nstopped")
        return STOP_SIGNAL_CODE
    except ChildFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    return 0
