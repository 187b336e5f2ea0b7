"""The head's side of a run on several machines: its door, servers and workers elsewhere, and those that come and go.

Guarantees: a machine, server or worker that fails at the start ends the run with its own message; servers that come
later, in the place of lost ones or on new machines, get the committed weights before they get traffic, as with
``agentrl servers add``; a machine that is lost is named.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from agentrl.config.recipe import Recipe
from agentrl.host.process import write_json
from agentrl.launch.addresses import MachineError, reach
from agentrl.launch.commands import ALONE, Meeting
from agentrl.launch.door import Door
from agentrl.launch.machines import Head, announce, gather, head_address, meeting
from agentrl.launch.placed_servers import FOLDER, json_of
from agentrl.launch.placement import machines, node, placed, words
from agentrl.launch.rank_network import OpenPort, require_reach
from agentrl.launch.supervisor import ChildFailed, ChildRefused
from agentrl.launch.worker_watch import READY

SECRET_FILE = "secret.json"  # in the run's processes/, readable by its owner alone
FAILED = "failed"  # in the run's processes/: failed/RANK.json of a machine that could not go on
POLL_SECONDS = 0.2
CLOCK_SECONDS = 30.0  # difference of clocks that is told
LOOK_SECONDS = 1.0  # between two looks for servers
CALL_SECONDS = 600.0  # for the controller to take a server in
EXPLAIN_SECONDS = 2.0  # for other machines to tell why the run failed
LOST_SECONDS = 20.0  # for ranks to notice that a machine of theirs is gone
REPLACED_SECONDS = 90.0  # for another machine in the place of one that is gone before the run began
AGAIN_SECONDS = 10.0  # after the controller refused one


class Fleet:
    """Machines of a run beside the head; on one machine it does nothing.

    Args:
        recipe: Resolved recipe.
        model: Folder of the starting model.
        run_dir: Folder of the run, with an empty ``processes/``.
        secret: Secret of the run.
        resume: Whether the run goes on from a checkpoint.

    Raises:
        MachineError: ``launch.head`` is no address of this machine.
    """

    def __init__(self, recipe: Recipe, model: Path, run_dir: Path, secret: str, *, resume: bool) -> None:
        self._recipe, self._run_dir, self._secret = recipe, run_dir, secret
        self._processes = run_dir / "processes"
        self._door: Door | None = None
        self._port: OpenPort | None = None
        self._odd_clocks: set[int] = set()  # machines whose clock was told of
        self.head: Head | None = None
        self._met = False
        self._known: dict[int, str] = {}  # number of a server -> URL
        self._pool = ThreadPoolExecutor(1, "servers")
        self._changing: Future[str] | None = None
        self._next_look = 0.0
        self._left: dict[int, float] = {}  # machine that is gone before the run began -> time
        self._missed: dict[int, float] = {}  # machine of trainer ranks that is gone -> time
        self._controller: dict[str, Any] = {}
        if machines(recipe) == 1:
            return
        write_json(self._processes / SECRET_FILE, {"secret": secret}, private=True)
        self._door = _open(recipe, secret)
        try:
            number = 0
            if recipe.trainer.nodes > 1:
                self._port = OpenPort(head_address(recipe))
                number = self._port.number
            self.head = announce(recipe, model, run_dir, resume=resume, door=self._door.port, open_port=number)
        except MachineError:
            self.close()
            raise

    def close(self) -> None:
        """Lets the other machines go."""
        for held in (self._door, self._port):
            if held is not None:
                held.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def server_urls(self, check: Callable[[], None], say: Callable[[str], None]) -> list[str]:
        """Waits until the servers on other machines are ready, and returns their URLs.

        Args:
            check: Called repeatedly; it raises when the run has failed meanwhile.
            say: Called with what a person should know.

        Raises:
            MachineError: A machine does not come or does not fit, or one of its servers cannot be reached from here.
            ChildFailed: A server does not start.
        """
        assert self.head is not None
        recipe, both = self._recipe, partial(self._check_both, check)
        self._gather(both, say)
        deadline = time.monotonic() + recipe.inference.start_timeout
        while len(self._known) < recipe.inference.servers:
            both()
            self._require_present()
            self._known = {number: str(said["url"]) for number, said in self._announced()}
            if time.monotonic() > deadline:
                missing = sorted(set(range(recipe.inference.servers)) - set(self._known))
                raise ChildFailed(
                    f"server {', '.join(map(str, missing))} was not ready within {recipe.inference.start_timeout:g} s "
                    f"(inference.start_timeout); see {self._run_dir / 'logs'}"
                )
            time.sleep(POLL_SECONDS)
        for number, said in self._announced():
            self._require_reached(number, said)
        return [self._known[number] for number in sorted(self._known)]

    def wait_workers(self, check: Callable[[], None], say: Callable[[str], None]) -> None:
        """Waits until the rollout workers on other machines can take orders.

        Args:
            check: Called repeatedly; it raises when the run has failed meanwhile.
            say: Called with what a person should know.

        Raises:
            MachineError: A machine does not come or does not fit.
            ChildFailed: A worker does not start.
        """
        recipe, both = self._recipe, partial(self._check_both, check)
        if not recipe.rollout.nodes:
            return
        self._gather(both, say)
        deadline, missing = time.monotonic() + recipe.inference.start_timeout, set(range(recipe.rollout.workers))
        while missing:
            both()
            self._require_present()
            missing = {number for number in missing if not (self._processes / READY.format(number)).is_file()}
            if missing and time.monotonic() > deadline:
                raise ChildFailed(
                    f"rollout worker {', '.join(map(str, sorted(missing)))} was not ready within "
                    f"{recipe.inference.start_timeout:g} s (inference.start_timeout); see {self._run_dir / 'logs'}"
                )
            time.sleep(POLL_SECONDS)

    def _check_both(self, check: Callable[[], None]) -> None:
        """Raises when the run has failed, here or on another machine."""
        check()
        self._check_failed()

    def _gather(self, check: Callable[[], None], say: Callable[[str], None]) -> None:
        """Waits once until all machines have come, and connects to those with trainer ranks."""
        if self._met:
            return
        assert self.head is not None
        say(f"waiting for {machines(self._recipe) - 1} more of {words(self._recipe)}")
        found = gather(self._recipe, self.head, self._run_dir, check)
        require_reach({rank: machine for rank, machine in found.items() if node(self._recipe, rank).trains})
        self._met = True

    def meeting(self, check: Callable[[], None], say: Callable[[str], None]) -> tuple[Meeting, dict[str, str]]:
        """Returns where the ranks meet, and environment for them, once all machines have come.

        Args:
            check: Called repeatedly; it raises when the run has failed meanwhile.
            say: Called with what a person should know.
        """
        if self.head is None:
            return ALONE, {}
        self._gather(partial(self._check_both, check), say)
        return meeting(self._recipe, self.head)

    def _announced(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for file in sorted((self._processes / FOLDER).glob("*.json")):
            said = json_of(file)
            if file.stem.isdigit() and "url" in said:
                yield int(file.stem), said

    def _require_reached(self, number: int, said: dict[str, Any]) -> None:
        """Connects to a server from here, as the controller will.

        Raises:
            MachineError: There is no connection; the message names both machines.
        """
        url = httpx.URL(said["url"])
        why = reach(url.host, url.port or 80)
        if why:
            raise MachineError(
                f"server {number} on node {said['node']} ({said['host']}) listens, but {why.replace(' yet', '')}: is "
                "the port open between the two? inference.port names a fixed one"
            )

    def _require_present(self) -> None:
        """Refuses to wait for a machine that is gone and does not come again, nor another one in its place."""
        assert self._door is not None
        self._left |= {rank: time.monotonic() for rank in self._door.lost()}
        for rank in self._door.inside():
            self._left.pop(rank, None)
        for rank, since in self._left.items():
            if time.monotonic() - since > REPLACED_SECONDS:
                raise ChildFailed(f"node {rank} ({self._host(rank)}) is gone before the run began")

    def _check_failed(self) -> None:
        for file in sorted((self._processes / FAILED).glob("*.json")):
            said = json_of(file)
            if said:
                kind = ChildRefused if said.get("refused") else ChildFailed
                raise kind(f"node {file.stem} ({said['host']}): {said['error']}")

    def _host(self, rank: int) -> str:
        return str(json_of(self._processes / f"node-{rank}.json").get("host", "unknown"))

    def serves_at(self, controller: dict[str, Any]) -> None:
        """Tells where the controller takes servers in."""
        self._controller = controller

    def news(self) -> list[str]:
        """Returns what has changed since the last call, in words; takes servers in that have come.

        Raises:
            ChildFailed: A machine of trainer ranks is gone, or could not take part, and the others have not noticed.
        """
        if self._door is None:
            return []
        lost = self._door.lost()
        self._missed |= {rank: time.monotonic() for rank in lost if node(self._recipe, rank).trains}
        self._require_ranks()
        found = [self._gone(rank) for rank in lost] + self._twice() + self._given_up() + self._clocks()
        if self._changing is not None and self._changing.done():
            text, self._changing = self._changing.result(), None
            found += [text] if text else []
        if placed(self._recipe) and self._changing is None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            for number, said in self._announced():
                if self._known.get(number) != said["url"]:
                    self._changing = self._pool.submit(self._take_in, number, said)
                    break
        return found

    def _twice(self) -> list[str]:
        """Returns which machines have come with the number of one that is there; the run goes on with the later one.

        Raises:
            ChildFailed: They have trainer ranks, of which torch then has some twice.
        """
        assert self._door is not None
        found = [
            (rank, f"two machines run with launch.node_rank={rank}, the later one is {self._host(rank)}: each needs a "
             f"number of its own ({words(self._recipe)})")
            for rank in self._door.twice()
        ]  # fmt: skip
        for rank, text in found:
            if node(self._recipe, rank).trains:
                raise ChildFailed(text)
        return [text for _, text in found]

    def _clocks(self) -> list[str]:
        """Returns which machines' clocks differ from this one's, each once."""
        assert self._door is not None
        off = {rank: gap for rank, gap in self._door.clocks().items() if abs(gap) > CLOCK_SECONDS}
        new = off.keys() - self._odd_clocks
        self._odd_clocks |= new
        return [f"the clock of node {rank} ({self._host(rank)}) is {off[rank]:+.0f} s off" for rank in sorted(new)]

    def _given_up(self) -> list[str]:
        """Returns why machines of servers or workers have ended, each once; the run goes on without them.

        Raises:
            ChildFailed: A machine of trainer ranks could not take part.
        """
        assert self._door is not None
        found: list[str] = []
        for file in sorted((self._processes / FAILED).glob("*.json")):
            said = json_of(file)
            trains = node(self._recipe, int(file.stem)).trains
            if said and trains and said.get("refused") and int(file.stem) not in self._door.inside():
                raise ChildFailed(f"node {file.stem} ({said['host']}): {said['error']}")  # its ranks are waited for
            if said and not trains:
                file.unlink(missing_ok=True)
                found.append(f"node {file.stem} ({said['host']}) has ended: {said['error']}")
        return found

    def explained(self, error: ChildFailed) -> ChildFailed:
        """Returns a failure with what other machines have to do with it, for which it waits a moment."""
        if self._door is None or isinstance(error, ChildRefused):
            return error
        deadline = time.monotonic() + EXPLAIN_SECONDS
        while time.monotonic() < deadline:
            try:
                self._check_failed()
            except ChildFailed as theirs:
                return type(theirs)(str(theirs))
            lost = [*self._missed, *(rank for rank in self._door.lost() if node(self._recipe, rank).trains)]
            if lost:
                return ChildFailed(f"{self._gone(lost[0])}\n{error}")
            time.sleep(POLL_SECONDS)
        return error

    def _require_ranks(self) -> None:
        """Ends a run whose ranks wait for a machine that is gone.

        Raises:
            ChildFailed: It has been gone for some seconds, in which its ranks' end would have ended the others.
        """
        for rank, since in self._missed.items():
            if time.monotonic() - since > LOST_SECONDS:
                raise ChildFailed(self._gone(rank))

    def _gone(self, rank: int) -> str:
        return f"node {rank} ({self._host(rank)}) is gone, its {node(self._recipe, rank).what} are lost"

    def _take_in(self, number: int, said: dict[str, Any]) -> str:
        """Has the controller take a server in, in place of the one that had its number; returns what became of it."""
        old, url = self._known.get(number), str(said["url"])
        headers = {"Authorization": f"Bearer {self._secret}"}
        where = f"{self._controller['url']}/servers"
        name = f"server {number} on node {said['node']} ({said['host']}, {url})"
        with httpx.Client(headers=headers, timeout=CALL_SECONDS, trust_env=False) as client:
            try:
                answer = client.post(where, json={"url": url})
                if answer.status_code != 200:
                    self._next_look = time.monotonic() + AGAIN_SECONDS
                    return f"{name} is not taken in yet: {answer.text[:500]}"
                self._known[number] = url
                if old is not None:
                    client.request("DELETE", where, json={"url": old})
            except httpx.HTTPError as error:
                self._next_look = time.monotonic() + AGAIN_SECONDS
                return f"{name} is not taken in yet: the controller does not answer ({error})"
        return f"{name} has joined{f' in place of {old}' if old else ''}"


def _open(recipe: Recipe, secret: str) -> Door:
    """Opens the head's door.

    Raises:
        MachineError: The address is of another machine, or the port is taken.
    """
    address, port = head_address(recipe), recipe.launch.port + 1 if recipe.launch.port else 0
    try:
        return Door(address, port, secret, recipe.launch.tls)
    except OSError as error:
        raise MachineError(
            f"launch.head={address} is no address of this machine, or port {port} is taken there "
            f"({error.strerror or error}): the head runs there, the others with launch.node_rank=1, 2, ..."
        ) from error


def write_failure(run_dir: Path, rank: int, host: str, error: str, *, refused: bool) -> None:
    """Tells the head why a machine cannot go on."""
    folder = run_dir / "processes" / FAILED
    with contextlib.suppress(OSError):  # the run has ended, or its disk is full
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{rank}.json", {"host": host, "error": error, "refused": refused})
