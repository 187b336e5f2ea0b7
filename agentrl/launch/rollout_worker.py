"""Entry point of a rollout worker: ``python -m agentrl.launch.rollout_worker``.

Guarantees: it runs the run's own workflow, tokenizer and connections to servers, in this process; it takes its orders
from the controller over HTTP, with the run's secret from the environment, and opens no port. What the recipe names and
this process cannot load is refused in one line. It ends with code 0 when the controller says that the run is over; on
SIGTERM, when its parent or its controller is gone, and when it was given up, it cancels its episodes, closes their
environments and ends within their limit.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run
from agentrl.config.recipe import Recipe
from agentrl.core.writer_thread import WriterThread
from agentrl.host.entry import STOPPED, begin, refuse, run_arguments
from agentrl.host.garbage import collect_rarely
from agentrl.host.process import write_json
from agentrl.inference.client import ChatClient
from agentrl.inference.traffic import WORKER_FILE, TrafficLog
from agentrl.launch.bounded_run import END_SECONDS, bounded_run, end_within
from agentrl.launch.loop_watch import LoopWatch
from agentrl.launch.run_folders import CONTROLLER
from agentrl.launch.worker_watch import READY
from agentrl.rollout.assemble import make_backend, make_client, make_workflow
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runs import InProcess
from agentrl.rollout.followed_servers import FollowedServers
from agentrl.rollout.worker_link import HttpLink
from agentrl.rollout.worker_loop import ControllerGone, WorkerLoop, WorkerRefused, insist
from agentrl.train.controller_client import SECRET_ENV

FILE_SECONDS = 0.1  # between two looks for the file with the controller's URL


async def work(recipe: Recipe, run_dir: Path, model: Path, index: int) -> int:
    """Run episodes until the run is over; returns the exit code."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    runs, client = _prepared(recipe, model)
    lines = WriterThread("logs")
    if recipe.logging.record:
        client.traffic = TrafficLog(run_dir / WORKER_FILE.format(index), lines)
    write_json(run_dir / "processes" / READY.format(index), {"pid": os.getpid()})
    collect_rarely(recipe.rollout.max_concurrent)
    stopped = asyncio.create_task(stopping.wait())
    serving = asyncio.create_task(_serve(recipe, client, runs, run_dir / CONTROLLER, index))
    watch = LoopWatch.of(recipe.rollout).start(asyncio.get_running_loop())
    try:
        await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            return STOPPED
        serving.result()
        return 0
    finally:
        watch.stop()
        stopped.cancel()
        serving.cancel()
        await asyncio.gather(stopped, serving, return_exceptions=True)
        await client.close()
        lines.close()
        if client.traffic is not None:
            client.traffic.close()


def _prepared(recipe: Recipe, model: Path) -> tuple[InProcess, ChatClient]:
    """Makes what runs the episodes, and its client.

    Raises:
        UserError: The recipe's components or the model's tokenizer cannot be loaded here.
    """
    try:
        client = make_client(recipe, model, [])
        return InProcess(make_workflow(recipe), client, recipe.rollout), client
    except (LookupError, ImportError, OSError, SyntaxError, TypeError, ValueError) as error:  # TimeoutError is OSError
        raise UserError(f"a rollout worker (rollout.workers) cannot begin: {error}") from error


async def _serve(recipe: Recipe, client: ChatClient, runs: InProcess, controller: Path, index: int) -> None:
    """Joins the controller, and runs its orders."""
    while not controller.is_file():
        await asyncio.sleep(FILE_SECONDS)
    said = json.loads(controller.read_bytes())
    url = said["workers_url" if recipe.rollout.nodes else "url"]
    secret, ca = os.environ.get(SECRET_ENV, ""), recipe.launch.tls.ca
    async with HttpLink(url, secret, f"worker-{index}", os.getpid(), ca) as link:
        loop: WorkerLoop
        servers = FollowedServers(
            client.router, lambda url: make_backend(recipe, url), index, lambda *report: loop.report(*report)
        )
        loop = WorkerLoop(link, runs, servers.follow)
        await insist(link.join)
        link.beat(lambda: runs.abandoned)
        await loop.serve()


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, and run the worker; returns its exit code."""
    parser = run_arguments("agentrl.launch.rollout_worker")
    parser.add_argument("--index", type=int, required=True, help="number of this worker in the run, from 0")
    parser.add_argument("--parent-pid", type=int)
    args = parser.parse_args(argv)
    begin(args.parent_pid)
    recipe = recipe_of_run(args.run_dir)
    code = 1  # also of an error that nobody foresaw
    try:
        code = bounded_run(work(recipe, args.run_dir, args.model, args.index), Limits.of(recipe.rollout).teardown)
    except UserError as error:
        code = refuse(error)
    except (ControllerGone, WorkerRefused) as error:
        print(error, file=sys.stderr)
    finally:
        end_within(END_SECONDS, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
