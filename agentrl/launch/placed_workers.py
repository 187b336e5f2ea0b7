"""Runs the rollout workers of a machine that runs workers only.

Guarantees: workers that end are started again as on the head; one that cannot begin is told to the head with the end of
its log; a machine that cannot connect to the controller on the head says so, with both addresses.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.config.recipe import Recipe
from agentrl.host.key_guard import KEY_ENV
from agentrl.launch import commands
from agentrl.launch.addresses import reach
from agentrl.launch.placed_servers import json_of
from agentrl.launch.placement import Node, served_beyond
from agentrl.launch.run_folders import CONTROLLER
from agentrl.launch.supervisor import ChildFailed, Supervisor
from agentrl.launch.worker_watch import WorkerWatch
from agentrl.train.controller_client import SECRET_ENV

POLL_SECONDS = 0.2
REACH_TRIES = 3


class NodeWorkers:
    """The rollout workers of one machine.

    Args:
        recipe: The head's resolved recipe.
        model: Folder of the model on this machine.
        run_dir: Folder of the run.
        supervisor: Starts the processes.
        one: Part of this machine in the run.
        secret: Secret of the run.
        over: Function that says whether the head has ended.
        say: Called with what a person should know.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Path,
        run_dir: Path,
        supervisor: Supervisor,
        one: Node,
        secret: str,
        over: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._recipe, self._run_dir, self._node = recipe, run_dir, one
        self._over, self._say = over, say
        env = {SECRET_ENV: secret, "TOKENIZERS_PARALLELISM": "false"}
        env |= {KEY_ENV: secret} if served_beyond(recipe) else {}
        command = partial(commands.rollout_worker, model, run_dir)
        self._watch = WorkerWatch(supervisor, one.workers, command, env, run_dir / "processes")

    def run(self) -> None:
        """Runs the workers until the head has ended.

        Raises:
            ChildFailed: A worker cannot begin or ends again and again, or the controller cannot be reached.
        """
        self._watch.start()
        self._watch.wait_ready(self._recipe.inference.start_timeout)
        self._say(f"{self._node.what} are ready")
        self._require_reach()
        while not self._over():
            for text in self._watch.poll():
                self._say(text)
            time.sleep(POLL_SECONDS)

    def _require_reach(self) -> None:
        """Connects to the controller as soon as it says where it is.

        Raises:
            ChildFailed: There is no connection.
        """
        url = ""
        while not url:
            if self._over():
                return
            url = str(json_of(self._run_dir / CONTROLLER).get("workers_url", ""))
            time.sleep(POLL_SECONDS)
        where = urlsplit(url)
        why = ""
        for _ in range(REACH_TRIES):
            why = reach(str(where.hostname), int(where.port or 0))
            if not why or self._over():
                return
        raise ChildFailed(
            f"{why.replace(' yet', '')}, where the controller on the head listens for rollout workers: is the port "
            "open between the two? It is the second after launch.port, where that is set"
        )
