"""Another machine of a run: it runs trainer ranks, rollout workers or servers, and nothing else.

Guarantees: it ends when its ranks end, and they end when the head's do or when the head is gone; a machine of servers
or workers ends when the head does. However it ends, no process of it remains, and the head is told why where it failed.
"""

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from agentrl.config.machines import TlsConfig
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED
from agentrl.host.cpu_env import CPU_ENV
from agentrl.host.stop_signals import STOP_SIGNAL_CODE
from agentrl.launch import commands
from agentrl.launch.addresses import MachineError, collective_env, own_address
from agentrl.launch.commands import Meeting
from agentrl.launch.door import Visit
from agentrl.launch.fleet import SECRET_FILE, write_failure
from agentrl.launch.machines import Head, head_address, join, trainer_machines
from agentrl.launch.needed_packages import needed_packages, require_packages
from agentrl.launch.placed_servers import NodeServers, json_of
from agentrl.launch.placed_workers import NodeWorkers
from agentrl.launch.placement import node
from agentrl.launch.rank_network import OpenPort, require_reach
from agentrl.launch.servers import find_model
from agentrl.launch.supervisor import ChildFailed, ChildRefused, Supervisor

POLL_SECONDS = 0.2
HEAD_SECONDS = 60.0  # between the end of the head and that of this machine's ranks


def join_run(recipe: Recipe, console: Console) -> int:
    """Waits for the head of a run and runs this machine's part of it; returns the exit code.

    Args:
        recipe: Recipe as loaded, with ``launch.node_rank`` above 0; what runs is the head's.
        console: Console to print to.

    Raises:
        MachineError: The head does not answer in time.
    """
    require_packages(needed_packages(recipe))
    run_dir, rank = Path(recipe.launch.run_dir) / recipe.name, recipe.launch.node_rank

    def say(text: str) -> None:
        console.print(f"node {rank}: {text}", highlight=False, markup=False, soft_wrap=True)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # of the whole job: the head's trainer decides
    port = _open_port(recipe)
    try:
        theirs, model, head = _joined(recipe, run_dir, console, say, port)
        visit = _visit(head, run_dir, rank, theirs.launch.tls)
        say(f"of the run {run_dir} on {head.machine.host}")
        try:
            _work(theirs, model, run_dir, head, visit, recipe, say)
        except ChildFailed as error:
            write_failure(run_dir, rank, socket.gethostname(), str(error), refused=isinstance(error, ChildRefused))
            raise
        finally:
            visit.leave()
    except KeyboardInterrupt:
        console.print("\nstopped")
        return STOP_SIGNAL_CODE
    except ChildFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    finally:
        if port is not None:
            port.close()
    return 0


def _open_port(recipe: Recipe) -> OpenPort | None:
    """Opens the port that other machines of trainer ranks try; ``None`` on a machine without ranks."""
    if not 0 < recipe.launch.node_rank < recipe.trainer.nodes:
        return None
    return OpenPort(own_address(head_address(recipe), recipe.launch.interface))


def _joined(
    recipe: Recipe, run_dir: Path, console: Console, say: Callable[[str], None], port: OpenPort | None
) -> tuple[Recipe, Path, Head]:
    """Waits for the head, and on a machine of trainer ranks connects to the others.

    Raises:
        MachineError: The head does not answer in time, or another machine of ranks cannot be reached; the head is told.
    """
    rank = recipe.launch.node_rank
    where = ("", 0) if port is None else (port.address, port.number)
    try:
        found = join(
            recipe, run_dir, lambda one: find_model(one, console).path, lambda text: say(f"waits: {text}"), *where
        )
        theirs, _, head = found
        if node(theirs, rank).trains:
            others = trainer_machines(theirs, run_dir, head.run)
            others.pop(rank, None)
            require_reach({0: head.machine, **others})
        return found
    except MachineError as error:
        if (run_dir / "processes").is_dir():
            write_failure(run_dir, rank, socket.gethostname(), str(error), refused=True)
        raise


def _visit(head: Head, run_dir: Path, rank: int, tls: TlsConfig) -> Visit:
    """Goes to the head's door.

    Raises:
        MachineError: It does not let this machine in.
    """
    try:
        secret = str(json_of(run_dir / "processes" / SECRET_FILE).get("secret", ""))
        return Visit(head.address, head.door, secret, rank, tls)
    except OSError as error:
        raise MachineError(
            f"node {rank} ({socket.gethostname()}) is not let in by the head at {head.address}:{head.door}: {error}"
        ) from error


def _work(
    theirs: Recipe, model: Path, run_dir: Path, head: Head, visit: Visit, own: Recipe, say: Callable[[str], None]
) -> None:
    """Runs this machine's part until the run is over.

    Raises:
        ChildFailed: A process of it failed.
    """
    one, supervisor = node(theirs, own.launch.node_rank), Supervisor(run_dir / "logs")
    interface = own.launch.interface or theirs.launch.interface
    env = {
        **CPU_ENV,
        **collective_env(head.address, interface),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        if one.trains:
            command = _trainer(theirs, model, run_dir, head, one.rank)
            watch = _HeadWatch(visit, head.machine.host)
            supervisor.wait([supervisor.start(f"trainer-{one.rank}", command, env=env)], watch.check)
            return
        secret = str(json_of(run_dir / "processes" / SECRET_FILE)["secret"])
        if one.workers:
            NodeWorkers(theirs, model, run_dir, supervisor, one, secret, lambda: visit.over, say).run()
            say("the head has ended")
            return
        address = own_address(head.address, interface)
        servers = NodeServers(theirs, model, run_dir, supervisor, one, address, secret, env, say)
        try:
            while not visit.over:
                servers.poll()
                time.sleep(POLL_SECONDS)
        finally:
            servers.close()
        say("the head has ended")
    finally:
        supervisor.stop()


class _HeadWatch:
    """Ends this machine's ranks where the head is gone and they have not noticed, as after a loss of power."""

    def __init__(self, visit: Visit, host: str) -> None:
        self._visit, self._host = visit, host
        self._since: float | None = None

    def check(self) -> None:
        """Does nothing while the head is there.

        Raises:
            ChildFailed: It has been gone for longer than the end of a run takes.
        """
        if self._since is None and self._visit.over:
            self._since = time.monotonic()
        if self._since is not None and time.monotonic() - self._since > HEAD_SECONDS:
            raise ChildFailed(f"the head ({self._host}) is gone, and this machine's ranks still wait for it")


def _trainer(theirs: Recipe, model: Path, run_dir: Path, head: Head, rank: int) -> list[str]:
    meeting = Meeting(head.address, head.port, rank)
    if theirs.trainer.type in SUPERVISED:
        ready = run_dir / "processes" / f"trainer-{rank}.json"
        return commands.examples_trainer(theirs, model, run_dir, ready, head.resume, meeting)
    return commands.trainer(theirs, model, run_dir, "", head.resume, meeting)
