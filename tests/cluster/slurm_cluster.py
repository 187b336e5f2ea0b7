"""A Slurm cluster of virtual nodes on this machine: its own daemons in one folder, as root."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
PLACES = "/usr/sbin:/sbin"  # of the daemons, which a user's path may lack


def missing() -> list[str]:
    """Commands that this machine lacks."""
    path = f"{os.environ['PATH']}:{PLACES}"
    return [name for name in COMMANDS if shutil.which(name, path=path) is None]


class SlurmCluster:
    """Starts the daemons, and ends them.

    Args:
        folder: Empty folder for all that they write.
        nodes: Number of virtual nodes.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        for name in ("state", "munge", "log"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        (folder / "slurm.conf").write_text("\n".join(self._config(nodes)) + "\n")
        path = f"{os.environ['PATH']}:{PLACES}"
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        munge = folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._run("munged", "--force", f"--socket={munge / 'socket'}", *files)
        self._run("slurmctld", "-c")
        self.nodes = [f"n{index + 1}" for index in range(nodes)]
        for name in self.nodes:
            self.begin(name)

    def _config(self, nodes: int) -> list[str]:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        own = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            "SlurmUser=root",
            f"SlurmctldPort={_port()}",
            "MpiDefault=none",
            "ReturnToService=2",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/socket",
            "CredType=cred/munge",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"StateSaveLocation={folder}/state",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmdLogFile={folder}/log/slurmd-%n.log",
            f"SlurmdSpoolDir={folder}/spool-%n",
            "SlurmdParameters=config_overrides",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SlurmctldTimeout=10",
            "SlurmdTimeout=20",
            "KillWait=15",
            "SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
        ]
        each = [
            f"NodeName=n{index + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={_port()} CPUs=4 RealMemory=4000"
            for index in range(nodes)
        ]
        return [*own, *each, f"PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP"]

    def _run(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True).stdout

    def begin(self, node: str) -> None:
        """Starts a node's daemon, and waits until the cluster counts on it."""
        self._run("slurmd", "-N", node)
        self._until(
            lambda: self._run("sinfo", "-h", "-n", node, "-o", "%T").strip() == "idle", what=lambda: self._run("sinfo")
        )

    def node_of(self, words: str) -> str:
        """Returns the node on which a process with such a command line runs."""
        found = [node for process, node in self._tasks() if words in " ".join(process.cmdline())]
        assert found, f"no node runs {words}"
        return found[0]

    def lose(self, node: str) -> None:
        """The node dies as one that loses its power does: its daemon, and all that runs on it."""
        tasks = [process for process, place in self._tasks() if place == node]
        family = {psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))}
        for task in tasks:
            with contextlib.suppress(psutil.NoSuchProcess):
                above = task.parent()
                family |= {task} | ({above} if above is not None and above.name() == "slurmstepd" else set())
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them may notice that another one is gone
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
        psutil.wait_procs(list(family), timeout=20)

    def _tasks(self) -> list[tuple[psutil.Process, str]]:
        """Processes of this cluster's jobs, each with its node."""
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if env.get("SLURM_CONF") == self.env["SLURM_CONF"] and "SLURMD_NODENAME" in env:
                found.append((process, env["SLURMD_NODENAME"]))
        return found

    def state(self, job: str) -> str:
        """State of a job, and its number of restarts: ``COMPLETED 0``."""
        said = self._run("scontrol", "show", "job", job).split()
        fields = {name: value for name, _, value in (one.partition("=") for one in said)}
        return f"{fields['JobState']} {fields['Restarts']}"

    def control(self, *command: str) -> str:
        """Runs a command of Slurm."""
        return self._run(*command)

    def wait(self, job: str, *states: str, seconds: float = 300) -> str:
        """Waits until a job is in one of some states."""
        self._until(lambda: self.state(job) in states, seconds, lambda: f"job {job} is {self.state(job)}")
        return self.state(job)

    def _until(
        self, true: Callable[[], bool], seconds: float = 60, what: Callable[[], str] = lambda: "nodes are not idle"
    ) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, what()
            time.sleep(0.2)

    def close(self) -> None:
        """Ends all jobs and daemons; a daemon that is gone before the steps of its jobs leaves their processes."""
        subprocess.run(["scancel", "--user=root"], env=self.env, check=False)
        try:
            self._until(lambda: self._run("squeue", "-h") == "", what=lambda: self._run("squeue"))
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        files = [*self.folder.glob("slurmd-*.pid"), self.folder / "slurmctld.pid", self.folder / "munge" / "pid"]
        pids = [int(file.read_text()) for file in files if file.is_file()]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, number)
            deadline = time.monotonic() + 10
            while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
                time.sleep(0.1)


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
