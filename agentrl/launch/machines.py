"""Brings the machines of a run together: the head, which runs everything, and others, which run trainer ranks.

Every machine runs ``agentrl recipe run RECIPE ...`` with the same settings; ``launch.node_rank`` says which one it is,
``launch.head`` is the head's address. They find one another through the run's folder, which all must see.

Guarantees: no rank starts before all machines have come; a machine that does not come, that has other versions of the
packages or another model, whose clock differs, or that cannot reach the head, is named. What an earlier run left in the
folder is not taken for this one's: a machine goes on only where the head answers.
"""

import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.host.process import write_json
from agentrl.launch.commands import ALONE, Meeting

HEAD_FILE = "head.json"  # in the run's processes/: written by the head
POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0  # for a connection to the head
CLOCK_SECONDS = 30.0  # difference of clocks that is told
PACKAGES = ("agentrl-toolkit", "torch", "transformers")


class MachineError(UserError):
    """The machines of a run do not come together; the message says which, and why."""


@dataclass(frozen=True)
class Machine:
    """Description that a machine gives of itself.

    Attributes:
        host: Name of the machine.
        versions: Package -> version.
        model: Fingerprint of the starting model.
        time: Time on its clock, in seconds since 1970.
        run: Identity of the run that it takes part in.
    """

    host: str
    versions: dict[str, str]
    model: str
    time: float
    run: str

    @classmethod
    def here(cls, model: Path, run: str) -> "Machine":
        """Describes this machine."""
        return cls(socket.gethostname(), versions(), fingerprint(model), time.time(), run)


@dataclass(frozen=True)
class Head:
    """Meeting point of a run's ranks.

    Attributes:
        run: Identity of this start of the run.
        address: Address of the head.
        port: Port of the ranks' store there.
        resume: Whether the run goes on from a checkpoint.
        machine: Description of the head.
    """

    run: str
    address: str
    port: int
    resume: bool
    machine: Machine


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that ranks must agree on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


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


def free_port(address: str) -> int:
    """Returns a port that is free at an address of this machine.

    Raises:
        MachineError: It is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.bind(found[4])
            return int(probe.getsockname()[1])
    except OSError as error:
        raise MachineError(
            f"launch.head={address} is no address of this machine ({error.strerror or error}): the head runs there, "
            "the others with launch.node_rank=1, 2, ..."
        ) from error


def announce(recipe: Recipe, model: Path, run_dir: Path, *, resume: bool) -> Head | None:
    """Writes the head's file, which the others wait for; called on the head.

    Args:
        recipe: Resolved recipe.
        model: Folder of the starting model.
        run_dir: Folder of the run.
        resume: Whether the run goes on from a checkpoint.

    Returns:
        The head as written; ``None`` where all ranks are on this machine.
    """
    if recipe.trainer.nodes == 1:
        return None
    address, run = head_address(recipe), secrets.token_hex(8)
    port = recipe.launch.port or free_port(address)
    head = Head(run, address, port, resume, Machine.here(model, run))
    write_json(run_dir / "processes" / HEAD_FILE, asdict(head))
    return head


def head_address(recipe: Recipe) -> str:
    """Returns the address that ``launch.head`` names.

    Raises:
        MachineError: It names none.
    """
    if recipe.launch.head is None:
        raise MachineError(f"trainer.nodes={recipe.trainer.nodes} needs launch.head=HOST: the address of node 0")
    return recipe.launch.head


def meet(
    recipe: Recipe, head: Head | None, run_dir: Path, check: Callable[[], None], say: Callable[[str], None]
) -> tuple[Meeting, dict[str, str]]:
    """Waits on the head for the other machines.

    Args:
        recipe: Resolved recipe.
        head: The announced head; ``None`` where all ranks are on this machine.
        run_dir: Folder of the run.
        check: Called repeatedly; it raises when the run has failed meanwhile.
        say: Called with what a person should know.

    Returns:
        Where the ranks meet, and environment variables for them.
    """
    if head is None:
        return ALONE, {}
    say(f"waiting for {recipe.trainer.nodes - 1} more of trainer.nodes={recipe.trainer.nodes}")
    for text in gather(recipe, head, run_dir, check):
        say(text)
    return Meeting(head.address, head.port, 0), collective_env(head.address)


def gather(recipe: Recipe, head: Head, run_dir: Path, check: Callable[[], None]) -> list[str]:
    """Waits on the head until all other machines have come; returns what is odd about them, in words.

    Args:
        recipe: Resolved recipe.
        head: The announced head.
        run_dir: Folder of the run.
        check: Called repeatedly; it raises when the run has failed meanwhile.

    Raises:
        MachineError: A machine did not come in time, or does not fit.
    """
    deadline = time.monotonic() + recipe.launch.node_timeout
    waited_for = set(range(1, recipe.trainer.nodes))
    odd: list[str] = []
    while waited_for:
        for rank in sorted(waited_for):
            machine = _arrived(run_dir, rank)
            if machine is not None and machine.run == head.run:
                odd += fit(head.machine, machine, rank, now=time.time())
                waited_for.discard(rank)
        check()
        if waited_for and time.monotonic() > deadline:
            missing = ", ".join(map(str, sorted(waited_for)))
            raise MachineError(
                f"node {missing} of trainer.nodes={recipe.trainer.nodes} did not come within "
                f"{recipe.launch.node_timeout:g} s (launch.node_timeout): run there the same command with "
                f"launch.node_rank={min(waited_for)}, on a disk where {run_dir} is this folder"
            )
        time.sleep(POLL_SECONDS)
    return odd


def _arrived(run_dir: Path, rank: int) -> Machine | None:
    data = _read(run_dir / "processes" / f"node-{rank}.json")
    return None if data is None else Machine(**data)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # a shared disk may show a name before its contents
        return None


def fit(head: Machine, other: Machine, rank: int, *, now: float) -> list[str]:
    """Returns what is odd about a machine that has come.

    Args:
        head: The head.
        other: The machine.
        rank: The machine's ``launch.node_rank``.
        now: The head's clock.

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
    gap = other.time - now
    return [f"the clock of {who} is {gap:+.0f} s off"] if abs(gap) > CLOCK_SECONDS else []


def join(
    recipe: Recipe, run_dir: Path, model: Callable[[Recipe], Path], say: Callable[[str], None]
) -> tuple[Recipe, Path, Head]:
    """Waits on another machine until the head answers; called with ``launch.node_rank`` above 0.

    Args:
        recipe: Recipe as loaded here; the head's is what runs.
        run_dir: Folder of the run.
        model: Function that finds the model of a recipe here.
        say: Called with what is waited for, when that changes.

    Returns:
        The head's resolved recipe, the folder of the model here, and the head.

    Raises:
        MachineError: The head did not answer in time.
    """
    rank, seconds = recipe.launch.node_rank, recipe.launch.node_timeout
    address, deadline = head_address(recipe), time.monotonic() + seconds
    told = ""
    answered: tuple[Recipe, Path, Head] | None = None
    for text, found in _heads(run_dir):
        if found is not None:
            if answered is None or answered[2] != found:
                answered = (*_take_part(run_dir, rank, found, model), found)
            text = reach(found.address, found.port)
            if not text:
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


def _take_part(run_dir: Path, rank: int, head: Head, model: Callable[[Recipe], Path]) -> tuple[Recipe, Path]:
    """Tells the head of this machine; returns the head's recipe, and the folder of its model here."""
    theirs = Recipe.model_validate_json((run_dir / "config.json").read_text())
    if rank >= theirs.trainer.nodes:
        raise MachineError(f"launch.node_rank={rank}: the head's run has trainer.nodes={theirs.trainer.nodes}")
    folder = model(theirs)
    write_json(run_dir / "processes" / f"node-{rank}.json", asdict(Machine.here(folder, head.run)))
    return theirs, folder


def _heads(run_dir: Path) -> Iterator[tuple[str, Head | None]]:
    """Yields again and again what the head has written, or what is missing."""
    while True:
        data = _read(run_dir / "processes" / HEAD_FILE)
        if data is None:
            here = "" if run_dir.is_dir() else "; the folder does not exist here: is launch.run_dir on a shared disk?"
            yield f"{run_dir / 'processes' / HEAD_FILE} is not there{here}", None
        else:
            yield "", Head(**{**data, "machine": Machine(**data["machine"])})


def reach(address: str, port: int) -> str:
    """Tries to connect; returns why it does not succeed, empty if it does."""
    try:
        with socket.create_connection((address, port), timeout=PROBE_SECONDS):
            return ""
    except OSError as error:
        why = error.strerror or str(error)
        return f"{socket.gethostname()} cannot connect to {address}:{port} yet ({why})"


def interface_to(address: str) -> str | None:
    """Returns the name of the network interface that this machine reaches an address through; ``None`` if unknown.

    The collectives of torch take the address that the host's own name resolves to, often a loopback one, unless they
    are told an interface.
    """
    found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            return name
    return None


def collective_env(address: str) -> dict[str, str]:
    """Returns the environment variables that bind torch's collectives to the interface that reaches the head.

    Variables that are set already stay as they are.
    """
    name = interface_to(address)
    wanted = () if name is None else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: str(name) for variable in wanted if variable not in os.environ}
