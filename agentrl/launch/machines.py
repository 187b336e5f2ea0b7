"""Brings the machines of a run together: the head, which runs everything, and others with trainer ranks or servers.

Every machine runs ``agentrl recipe run RECIPE ...`` with the same settings; ``launch.node_rank`` says which one it is,
``launch.head`` is the head's address. They find one another through the run's folder, which all must see.

Guarantees: no rank starts before all machines have come; a machine that does not come, that has other versions of the
packages or another model, or that cannot reach the head, is named. What an earlier run left in the
folder is not taken for this one's: a machine goes on only where the head answers.
"""

import contextlib
import errno
import hashlib
import json
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import agentrl
from agentrl.config.recipe import Recipe
from agentrl.host.process import write_json
from agentrl.launch.addresses import MachineError, collective_env, reach
from agentrl.launch.commands import ALONE, Meeting
from agentrl.launch.placement import gpus, machines, most_machines, node, visible_gpus, words

HEAD_FILE = "head.json"  # in the run's processes/: written by the head
POLL_SECONDS = 0.2
USER_CODE = ("agents", "envs", "recipes")  # folders of the package
PACKAGES = ("agentrl-toolkit", "torch", "transformers")


@dataclass(frozen=True)
class Machine:
    """Description that a machine gives of itself.

    Attributes:
        host: Name of the machine.
        versions: Package -> version.
        model: Fingerprint of the starting model.
        run: Identity of the run that it takes part in.
        gpus: Number of its NVIDIA GPUs that this process may use.
        address: Address of the machine where other ranks reach it; empty where it runs none.
        port: Port that is open there for a trial; 0 for none.
    """

    host: str
    versions: dict[str, str]
    model: str
    run: str
    gpus: int = 0
    address: str = ""
    port: int = 0

    @classmethod
    def here(cls, model: Path, run: str, address: str = "", port: int = 0) -> "Machine":
        """Describes this machine."""
        return cls(socket.gethostname(), versions(), fingerprint(model), run, count_gpus(), address, port)


@dataclass(frozen=True)
class Head:
    """Meeting point of a run's ranks.

    Attributes:
        run: Identity of this start of the run.
        address: Address of the head.
        port: Port of the ranks' store there.
        resume: Whether the run goes on from a checkpoint.
        machine: Description of the head.
        door: Port of the head's door (:mod:`agentrl.launch.door`).
    """

    run: str
    address: str
    port: int
    resume: bool
    machine: Machine
    door: int = 0


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that ranks must agree on, and of agentrl's own files."""
    found = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    return found | {"agentrl's files": source_fingerprint(Path(agentrl.__file__).parent)}


def source_fingerprint(package: Path) -> str:
    """Returns a text that differs with a package's Python files: a checkout that was changed keeps its version.

    Environments, agents and recipes are left out: a machine may have some that the run does not use.
    """
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] in USER_CODE:
            continue
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def fingerprint(model: Path) -> str:
    """Returns a model folder's config and the sizes of its weight files, as a text that differs with them."""
    files = sorted((file.name, file.stat().st_size) for file in model.glob("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config.pop("_name_or_path", None)
    return json.dumps([config, files], sort_keys=True)


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use, without a library that would hold them."""
    return len(visible_gpus())


def free_port(address: str, wanted: int = 0) -> int:
    """Returns a port that is free at an address of this machine.

    Args:
        address: The address.
        wanted: ``launch.port``; 0 for any.

    Raises:
        MachineError: It is no address of this machine, or the wanted port is taken.
    """
    try:
        found = socket.getaddrinfo(address, wanted, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that just closed may be taken again
            probe.bind(found[4])
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MachineError(
                f"launch.port={wanted} is taken on this machine (another run?): choose another, of which the next two "
                "are free as well, or 0 for free ones"
            ) from error
        raise MachineError(
            f"launch.head={address} is no address of this machine ({error.strerror or error}): the head runs there, "
            "the others with launch.node_rank=1, 2, ..."
        ) from error


def announce(
    recipe: Recipe, model: Path, run_dir: Path, *, resume: bool, door: int = 0, open_port: int = 0
) -> Head | None:
    """Writes the head's file, which the others wait for; called on the head.

    Args:
        recipe: Resolved recipe.
        model: Folder of the starting model.
        run_dir: Folder of the run.
        resume: Whether the run goes on from a checkpoint.
        door: Port of the head's door.
        open_port: Port that the other machines of trainer ranks try to connect to; 0 for none.

    Returns:
        The head as written; ``None`` where all is on this machine.

    Raises:
        MachineError: The head itself does not fit, or ``launch.head`` is another machine.
    """
    if machines(recipe) == 1:
        return None
    address, run = head_address(recipe), secrets.token_hex(8)
    port = free_port(address, recipe.launch.port)
    head = Head(run, address, port, resume, Machine.here(model, run, address, open_port), door)
    require_gpus(recipe, head.machine, 0)
    write_json(run_dir / "processes" / HEAD_FILE, asdict(head))
    return head


def require_gpus(recipe: Recipe, machine: Machine, rank: int) -> None:
    """Refuses a machine that has fewer GPUs than its part of the run needs.

    Raises:
        MachineError: It has fewer.
    """
    needed = gpus(recipe, node(recipe, rank))
    if machine.gpus < needed:
        raise MachineError(f"node {rank} ({machine.host}) has {machine.gpus} GPUs, its part of the run needs {needed}")


def head_address(recipe: Recipe) -> str:
    """Returns the address that ``launch.head`` names.

    Raises:
        MachineError: It names none.
    """
    if recipe.launch.head is None:
        raise MachineError(f"{words(recipe)} needs launch.head=HOST: the address of node 0")
    return recipe.launch.head


def meeting(recipe: Recipe, head: Head) -> tuple[Meeting, dict[str, str]]:
    """Returns where the ranks of a run meet, and environment variables for those of the head."""
    where = Meeting(head.address, head.port, 0) if recipe.trainer.nodes > 1 else ALONE
    return where, collective_env(head.address, recipe.launch.interface)


def gather(recipe: Recipe, head: Head, run_dir: Path, check: Callable[[], None]) -> dict[int, Machine]:
    """Waits on the head until all other machines have come; returns their descriptions by their numbers.

    Args:
        recipe: Resolved recipe.
        head: The announced head.
        run_dir: Folder of the run.
        check: Called repeatedly; it raises when the run has failed meanwhile.

    Raises:
        MachineError: A machine did not come in time, or does not fit.
    """
    deadline = time.monotonic() + recipe.launch.node_timeout
    waited_for = set(range(1, machines(recipe)))
    found: dict[int, Machine] = {}
    while waited_for:
        for rank in sorted(waited_for):
            machine = _arrived(run_dir, rank)
            if machine is not None and machine.run == head.run:
                require_fit(head.machine, machine, rank)
                require_gpus(recipe, machine, rank)
                found[rank] = machine
                waited_for.discard(rank)
        check()
        if waited_for and time.monotonic() > deadline:
            missing = ", ".join(map(str, sorted(waited_for)))
            raise MachineError(
                f"node {missing} of {words(recipe)} did not come within "
                f"{recipe.launch.node_timeout:g} s (launch.node_timeout): run there the same command with "
                f"launch.node_rank={min(waited_for)}, on a disk where {run_dir} is this folder"
            )
        time.sleep(POLL_SECONDS)
    return found


def trainer_machines(recipe: Recipe, run_dir: Path, run: str) -> dict[int, Machine]:
    """Returns the machines of trainer ranks that have come to a run, without the head."""
    found = {rank: _arrived(run_dir, rank) for rank in range(1, recipe.trainer.nodes)}
    return {rank: machine for rank, machine in found.items() if machine is not None and machine.run == run}


def _arrived(run_dir: Path, rank: int) -> Machine | None:
    data = _read(run_dir / "processes" / f"node-{rank}.json")
    return None if data is None else Machine(**data)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # a shared disk may show a name before its contents
        return None


def require_fit(head: Machine, other: Machine, rank: int) -> None:
    """Refuses a machine that differs from the head.

    Args:
        head: The head.
        other: The machine.
        rank: The machine's ``launch.node_rank``.

    Raises:
        MachineError: The machine has other packages or another model.
    """
    who = f"node {rank} ({other.host})"
    wrong = [
        f"{name} {other.versions.get(name, 'not installed')} instead of {known}"
        for name, known in head.versions.items()
        if other.versions.get(name) != known
    ]
    if wrong:
        raise MachineError(f"{who} has {', '.join(wrong)} as on the head ({head.host})")
    if other.model != head.model:
        raise MachineError(f"{who} has another model than the head ({head.host}) under the same name")


def join(
    recipe: Recipe,
    run_dir: Path,
    model: Callable[[Recipe], Path],
    say: Callable[[str], None],
    address: str = "",
    open_port: int = 0,
) -> tuple[Recipe, Path, Head]:
    """Waits on another machine until the head answers; called with ``launch.node_rank`` above 0.

    Args:
        recipe: Recipe as loaded here; the head's is what runs.
        run_dir: Folder of the run.
        model: Function that finds the model of a recipe here.
        say: Called with what is waited for, when that changes.
        address: Address of this machine in the run's network.
        open_port: Port that the other machines of trainer ranks try to connect to; 0 for none.

    Returns:
        The head's resolved recipe, the folder of the model here, and the head.

    Raises:
        MachineError: The head did not answer in time, or has other packages or another model.
    """
    rank, seconds = recipe.launch.node_rank, recipe.launch.node_timeout
    address, deadline = head_address(recipe), time.monotonic() + seconds
    told = ""
    answered: tuple[Recipe, Path, Head] | None = None
    mine: Machine | None = None
    for text, found in _heads(run_dir):
        if found is not None:
            if answered is None or mine is None or answered[2] != found:
                theirs, folder, mine = _take_part(run_dir, rank, found, model, address, open_port)
                answered = (theirs, folder, found)
            trains = node(answered[0], rank).trains  # the others need not wait for the trainer's start
            text = reach(found.address, found.port if trains else found.door)
            if not text:
                require_fit(found.machine, mine, rank)  # the head compares those that it starts with alone
                return answered
        if text != told:
            say(text)
            told = text
        if time.monotonic() > deadline:
            raise MachineError(
                f"node {rank} ({socket.gethostname()}) waited {seconds:g} s (launch.node_timeout) for the head at "
                f"{address}: {text}"
            )
        time.sleep(POLL_SECONDS)
    raise AssertionError


def _take_part(
    run_dir: Path, rank: int, head: Head, model: Callable[[Recipe], Path], address: str, open_port: int
) -> tuple[Recipe, Path, Machine]:
    """Tells the head of this machine; returns the head's recipe, the folder of its model here, and what was told."""
    theirs = Recipe.model_validate_json((run_dir / "config.json").read_text())
    if rank >= most_machines(theirs):
        raise MachineError(f"launch.node_rank={rank}: the head's run has {words(theirs)}")
    folder = model(theirs)
    mine = Machine.here(folder, head.run, address, open_port)
    with contextlib.suppress(FileNotFoundError):  # what an earlier start left is just removed; the next head is told
        write_json(run_dir / "processes" / f"node-{rank}.json", asdict(mine))
    return theirs, folder, mine


def _heads(run_dir: Path) -> Iterator[tuple[str, Head | None]]:
    """Yields again and again what the head has written, or what is missing."""
    while True:
        data = _read(run_dir / "processes" / HEAD_FILE)
        if data is None:
            here = "" if run_dir.is_dir() else "; the folder does not exist here: is launch.run_dir on a shared disk?"
            yield f"{run_dir / 'processes' / HEAD_FILE} is not there{here}", None
        else:
            yield "", Head(**{**data, "machine": Machine(**data["machine"])})
