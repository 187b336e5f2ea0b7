"""Runs the inference servers of a machine that runs servers only, and announces them to the head.

Guarantees: a server listens at this machine's address in the run's network and answers no call without the run's key,
which is tried before it is announced; servers that would read new weights from a shared disk share one copy
(:mod:`agentrl.launch.weight_relay`); one that ends is started again, a few times; one that does not start is told to
the head with the end of its log.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from agentrl.config.recipe import Recipe
from agentrl.host.key_guard import KEY_ENV
from agentrl.host.process import write_json
from agentrl.inference.http import Access
from agentrl.inference.kinds.kind import ServerStart, server_kind
from agentrl.launch import commands
from agentrl.launch.model_shape import shape_of_folder
from agentrl.launch.placement import Node, visible_devices
from agentrl.launch.resolve import pushed_bytes
from agentrl.launch.servers import server_start, url_of
from agentrl.launch.supervisor import Child, ChildFailed, Supervisor
from agentrl.launch.weight_relay import WeightRelay, has_room

FOLDER = "servers"  # in the run's processes/: NUMBER.json for each server that is ready
AGAIN = 3  # times that a server which ended is started again
PROBE_SECONDS = 5.0


@dataclass
class _Running:
    number: int
    start: ServerStart
    child: Child
    begun: float
    attempt: int = 0
    url: str = ""  # set when it is ready


class NodeServers:
    """The servers of one machine.

    Args:
        recipe: The head's resolved recipe.
        model: Folder of the model on this machine.
        run_dir: Folder of the run.
        supervisor: Starts the processes.
        one: Part of this machine in the run.
        address: Address of this machine in the run's network.
        secret: Secret of the run, the servers' key.
        env: More environment for the servers.
        say: Called with what a person should know.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Path,
        run_dir: Path,
        supervisor: Supervisor,
        one: Node,
        address: str,
        secret: str,
        env: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._recipe, self._model, self._run_dir = recipe, model, run_dir
        self._supervisor, self._node, self._address = supervisor, one, address
        self._access = Access(secret, recipe.launch.tls.ca)
        self._env, self._say = env, say
        self._kind = server_kind(recipe.inference.engine)
        (run_dir / "processes" / FOLDER).mkdir(parents=True, exist_ok=True)
        self._relay = self._made_relay()
        self._running = [self._start(number, 0) for number in one.servers]

    def close(self) -> None:
        """Ends the relay; the supervisor ends the servers."""
        if self._relay is not None:
            self._relay.close()

    def _made_relay(self) -> WeightRelay | None:
        """Starts a relay where several servers of this machine would read each version from the shared disk."""
        recipe = self._recipe
        if recipe.weights.transport != "disk" or len(self._node.servers) < 2:
            return None
        nbytes = pushed_bytes(recipe, shape_of_folder(self._model))
        if not has_room(nbytes):
            self._say(f"shared memory has no room for two versions of {nbytes / 1e9:.3g} GB: each server reads its own")
            return None
        return WeightRelay(self._address, self._access.key, recipe.launch.tls, self._run_dir)

    def _start(self, number: int, attempt: int) -> _Running:
        index = self._node.servers.index(number)
        ready = self._run_dir / "processes" / f"server-{number}.json"
        ready.unlink(missing_ok=True)
        start = server_start(self._recipe, self._model, ready, number, self._address)
        if self._recipe.inference.port:
            port = self._recipe.inference.port + index + attempt * len(self._node.servers)
            start = replace(start, port=port)
        env = {**self._kind.env(start), **self._env, **visible_devices(self._recipe, index)}
        env[KEY_ENV] = self._access.key
        command = commands.server(self._kind, start, self._recipe.inference.args)
        child = self._supervisor.start(f"server-{number}", command, env=env)
        return _Running(number, start, child, time.monotonic(), attempt)

    def poll(self) -> None:
        """Announces servers that have become ready, and starts those again that have ended.

        Raises:
            ChildFailed: A server does not start, or ends again and again.
        """
        for index, one in enumerate(self._running):
            code = one.child.process.poll()
            if code is not None and (not one.url or one.attempt == AGAIN):
                raise ChildFailed(
                    f"{one.child.name} exited with code {code}{' again' * bool(one.url)}; the end of {one.child.log}:\n"
                    f"{one.child.tail()}"
                )
            if code is not None:
                self._say(f"{one.child.name} exited with code {code} and is started again; see {one.child.log}")
                self._running[index] = self._start(one.number, one.attempt + 1)
            elif not one.url:
                self._look(one)

    def _look(self, one: _Running) -> None:
        """Announces a server if it is ready."""
        url = self._url(one)
        if url and self._answers(one, url):
            one.url = url
            said = {"url": url, "node": self._node.rank, "host": socket.gethostname(), "pid": os.getpid()}
            if self._relay is not None:
                said["relay"] = self._relay.url
            write_json(self._run_dir / "processes" / FOLDER / f"{one.number}.json", said)
            self._say(f"{one.child.name} is ready at {url}")
        elif time.monotonic() - one.begun > self._recipe.inference.start_timeout:
            raise ChildFailed(
                f"{one.child.name} was not ready within {self._recipe.inference.start_timeout:g} s "
                f"(inference.start_timeout); the end of {one.child.log}:\n{one.child.tail()}"
            )

    def _url(self, one: _Running) -> str:
        """Returns the URL of a server that may be ready; empty for one that has not said so."""
        if self._kind.ready_path is None:
            file = one.start.ready_file
            return _url_in(file) if file.is_file() else ""
        return url_of(one.start)

    def _answers(self, one: _Running, url: str) -> bool:
        """Whether a server answers with the key.

        Raises:
            ChildFailed: It answers without the key too, or does not trust this run's authority.
        """
        where = url + (self._kind.ready_path or "/model_info")
        try:
            with httpx.Client(verify=self._access.trust, timeout=PROBE_SECONDS, trust_env=False) as client:
                if client.get(where, headers=self._access.headers).status_code != 200:
                    return False
                without = client.get(where).status_code
        except httpx.HTTPError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ChildFailed(
                    f"the certificate of {url} (launch.tls.certificate) is refused: {error}; it must name "
                    f"{one.start.host} and be signed by launch.tls.ca"
                ) from error
            return False
        if without != 401:
            raise ChildFailed(f"{url} answers {without} without the run's key: this server cannot be guarded")
        return True


def _url_in(file: Path) -> str:
    return str(json_of(file).get("url", ""))


def json_of(file: Path) -> dict[str, object]:
    """Reads a file of a process; empty while it is not whole, as a shared disk may show it."""
    try:
        said = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
