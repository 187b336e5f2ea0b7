"""Entry point of the rollout controller: ``python -m agentrl.launch.controller_process``.

Guarantees: what can be found out without servers (the data, the tokenizer, the first prompts) is found out while they
load, and refused in one line (:func:`agentrl.host.entry.refuse`); it writes its URL to ``--ready-file`` as
soon as it listens; it ends by itself with code 0 after the final evaluation, and with a message and another code if the
trainer's heartbeats stop or the rollouts cannot continue; however it ends, it leaves no server paused.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from agentrl.config.baseline import check_tags
from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run
from agentrl.config.recipe import Recipe
from agentrl.config.teacher import as_teacher
from agentrl.core.writer_thread import WriterThread
from agentrl.data.datasets import LoadedTasks, load_tasks
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.versions import version_metrics
from agentrl.host.entry import STOPPED, begin, refuse, run_arguments
from agentrl.host.garbage import collect_rarely
from agentrl.host.process import CpuShare, write_json
from agentrl.inference.backend import InferenceError
from agentrl.inference.router import Router
from agentrl.inference.traffic import FILE as TRAFFIC_FILE
from agentrl.inference.traffic import TrafficLog
from agentrl.launch.bounded_run import END_SECONDS, bounded_run, end_within
from agentrl.launch.first_prompt import first_prompt
from agentrl.launch.loop_watch import LoopWatch
from agentrl.launch.paused_servers import note_paused
from agentrl.launch.placed_servers import FOLDER
from agentrl.launch.placement import placed
from agentrl.launch.worker_port import WorkerPort
from agentrl.launch.worker_watch import LOST_WORKERS
from agentrl.observe.sinks import METRICS_FILE, MetricsWriter, read_metrics
from agentrl.rollout.assemble import (
    access_to_servers,
    first_push_probe,
    make_backend,
    make_client,
    make_workflow,
    pause_mode,
)
from agentrl.rollout.controller import Controller
from agentrl.rollout.curriculum import Curriculum
from agentrl.rollout.deadline import Limits
from agentrl.rollout.failed_episodes import FailedEpisodes
from agentrl.rollout.followed_servers import servers_as_json
from agentrl.rollout.held_groups import owed_step
from agentrl.rollout.http_api import make_app
from agentrl.rollout.journal import Journal
from agentrl.rollout.server_pool import ServerPool
from agentrl.rollout.tasks import TaskStream, about_batches
from agentrl.rollout.teacher_scoring import Teacher
from agentrl.rollout.worker_api import worker_routes
from agentrl.rollout.worker_processes import WorkerProcesses, places_of
from agentrl.rollout.worker_wire import check_rows
from agentrl.train.checkpoint_state import ROLLOUTS_FILE, latest_checkpoint, read_state
from agentrl.train.controller_client import SECRET_ENV
from agentrl.weights.pauses import Pauses
from agentrl.weights.relays import Relays
from agentrl.weights.transaction import Committed, WeightTransaction

log = logging.getLogger(__name__)
FILE_SECONDS = 0.1  # between two looks for the file with the servers' URLs
TEACHER_KEY_ENV = "AGENTRL_TEACHER_KEY"  # key of teacher.urls, where their servers want one
LOST = 3  # exit code when the trainer is silent
GRACE_SECONDS = 1  # for calls that are in flight when the controller stops


async def serve(
    recipe: Recipe,
    run_dir: Path,
    model: Path,
    servers_file: Path,
    ready_file: Path,
    *,
    resume: bool,
) -> int:
    """Run the controller until the run is over; returns the exit code."""
    workflow = make_workflow(recipe)
    training = load_tasks(recipe.train_dataset, seed=recipe.seed, env=recipe.env)
    held_out = load_tasks(recipe.valid_dataset, seed=recipe.seed, env=recipe.env)
    check_tags(training.tasks, recipe.trainer.baseline)
    if recipe.rollout.workers:
        check_rows([*training.tasks, *held_out.tasks])
    stream = make_stream(recipe, training)
    problem = (await first_prompt(recipe, model, workflow, training.tasks)).problem
    servers = await _servers(servers_file, start_limit(recipe))
    external = bool(recipe.inference.urls)  # their weights are unknown, so they get the starting weights first
    urls, teacher_urls = servers["servers"], servers["teacher"]
    client = make_client(recipe, model, [] if external else urls)
    router = client.router
    lines = WriterThread("logs")
    if recipe.logging.record:
        client.traffic = TrafficLog(run_dir / TRAFFIC_FILE, lines)
    pack_after = recipe.logging.pack_after  # MB
    journal = Journal(
        run_dir,
        episodes=recipe.logging.episodes,
        pack_after=None if pack_after is None else pack_after * 1_000_000,
        writer=lines,
    )
    journal.own()
    writer = MetricsWriter(run_dir, tensorboard=recipe.logging.tensorboard, writer=lines)
    failed = FailedEpisodes(run_dir, lines)
    workers = make_workers(recipe, router, run_dir / "processes") if recipe.rollout.workers else None
    evaluator = Evaluator(recipe, workflow, client, journal, held_out, workers)
    lease = recipe.weights.lease_seconds
    pauses = Pauses(note_paused(run_dir) if external else lambda urls: None, lease)
    placed_at, access = run_dir / "processes" / FOLDER, access_to_servers(recipe)
    near = Relays(placed_at, run_dir, access, lease).near if placed(recipe) else None
    mode, probe = pause_mode(recipe, client.template), first_push_probe(recipe, client.template)
    weights = WeightTransaction(router, Committed(0, str(model)), mode, lease, pauses, near, probe)

    teacher = make_teacher(recipe, teacher_urls)

    server_pool = ServerPool(router, weights, lambda url: make_backend(recipe, url), lease)

    async def evaluate(version: int) -> dict[str, float]:
        beside = recipe.eval.on_push == "reserve" and not controller.ending
        async with server_pool.reserved() if beside else contextlib.nullcontext():
            summary = await evaluator.run(version)
        found = version_metrics(evaluator.ended, version)
        try:
            whole = evaluator.as_json(summary) | found
            await asyncio.to_thread(write_json, run_dir / f"eval-{version:06d}.json", whole)
        except OSError as error:  # a full disk: its numbers are in metrics.jsonl too
            log.warning("the evaluation of version %d could not be written: %s", version, error)
        return summary.as_metrics() | found

    share = CpuShare()

    def write_metrics(step: int, metrics: dict[str, float]) -> None:
        used = share.since_last()
        writer.write(step, metrics if used is None else metrics | {"rollout/controller_cpu": used})

    controller = Controller(
        recipe,
        stream,
        workflow,
        client,
        weights,
        journal,
        write_metrics,
        evaluate,
        teacher.score if teacher is not None else None,
        failed,
        workers,
    )
    router.rejoin = weights.join
    router.start()
    if teacher is not None:
        await teacher.start()
    for url in urls if external else ():
        await server_pool.add(url)
    checkpoint = latest_checkpoint(run_dir / "checkpoints") if resume else None
    if checkpoint is not None:
        step, rollouts = read_state(checkpoint)["step"], (checkpoint / ROLLOUTS_FILE).read_bytes()
        owed = owed_step(rollouts)  # beside training, an evaluation may be of a step before the last
        recorded = writer.void_after(step, owed if owed is not None else step)
        evaluated = any("eval/n" in record for record in read_metrics(run_dir / METRICS_FILE) if record["step"] == step)
        controller.restore(step, rollouts, recorded=recorded, evaluated=evaluated)
    secret = os.environ.get(SECRET_ENV, "")
    routes = worker_routes(workers, router, secret) if workers else ()
    app = make_app(controller, server_pool, secret, routes)
    elsewhere = WorkerPort(recipe, routes) if recipe.rollout.nodes else None
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,  # any free port
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # this process handles signals
    socket = config.bind_socket()
    socket.listen()  # who is told the address may connect at once
    serving = asyncio.create_task(server.serve([socket]))
    host, port = socket.getsockname()[:2]
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    batches = about_batches(len(stream), recipe.rollout.batch_size, recipe.trainer.epochs)
    data = f"{training.source}; {batches}" if batches else training.source
    data += f"; the first prompt could not be tried: {problem}" if problem else ""
    announcement = {"url": f"http://{host}:{port}", "pid": os.getpid(), "data": data, "secret": secret}
    if elsewhere is not None:
        announcement["workers_url"] = elsewhere.url
    write_json(ready_file, announcement, private=True)
    watch = LoopWatch.of(recipe.rollout).start(asyncio.get_running_loop())
    collect_rarely(recipe.rollout.max_concurrent)
    try:
        if workers is not None:
            workers.start()
        controller.start()
        controller.last_beat = time.monotonic()
        return await until_over(controller, recipe.launch.heartbeat_timeout, stopping)
    finally:
        watch.stop()
        await controller.close()  # also answers calls that wait for a batch
        if workers is not None:
            await workers.close()  # its episodes are cancelled by now
        if elsewhere is not None:
            await elsewhere.close()
        server.should_exit = True
        await serving
        await weights.close()  # a push that was cut off leaves servers paused
        await router.close()
        if teacher is not None:
            await teacher.close()
        try:
            lines.close()
        finally:
            journal.close()
            if client.traffic is not None:
                client.traffic.close()
            failed.close()
            writer.close()


async def _servers(file: Path, limit: float) -> dict[str, list[str]]:
    """Waits until the launcher has started the servers; returns the URLs of the policy's and the teacher's.

    Raises:
        InferenceError: The launcher has not started them within ``limit`` seconds.
    """
    try:
        async with asyncio.timeout(limit):
            while not file.is_file():
                await asyncio.sleep(FILE_SECONDS)
    except TimeoutError as error:
        raise InferenceError(
            f"the servers were not started within {limit:g} s (inference.start_timeout for each, one after the other)"
        ) from error
    return json.loads(file.read_text())


def start_limit(recipe: Recipe) -> float:
    """Seconds in which the launcher starts all servers or gives up, and some to spare."""
    teachers = recipe.teacher.servers if recipe.teacher.model is not None else 0
    machines = recipe.launch.node_timeout if recipe.inference.nodes or recipe.rollout.nodes else 0.0
    return machines + recipe.inference.start_timeout * (1 + recipe.inference.servers + teachers)


def make_stream(recipe: Recipe, training: LoadedTasks) -> TaskStream:
    """Makes the stream of training tasks that the recipe asks for.

    Raises:
        DataError: The tasks do not fit the recipe's curriculum.
    """
    shuffle, config = recipe.train_dataset.shuffle, recipe.rollout.curriculum
    curriculum = Curriculum(training.tasks, config, recipe.seed, shuffle=shuffle) if config.active else None
    return TaskStream(training.tasks, recipe.seed, shuffle=shuffle, epochs=recipe.trainer.epochs, curriculum=curriculum)


def make_teacher(recipe: Recipe, urls: Sequence[str]) -> Teacher | None:
    """Returns the recipe's teacher, which scores on its servers; ``None`` without teacher servers."""
    if not urls:
        return None
    served = as_teacher(recipe)
    backends = [make_backend(served, url, TEACHER_KEY_ENV) for url in urls]
    return Teacher(Router(backends, probe_seconds=recipe.inference.probe_seconds, patience=recipe.inference.patience))


def make_workers(recipe: Recipe, router: Router, processes: Path) -> WorkerProcesses:
    """Makes the place where the recipe's worker processes run episodes; the launcher starts the processes.

    Args:
        recipe: Recipe with ``rollout.workers``.
        router: The controller's router, whose changes the workers are told.
        processes: Folder with the file that tells the launcher which workers were given up.
    """
    given_up: dict[str, int] = {}

    def lost(name: str, pid: int, reason: str) -> None:
        given_up[name] = pid
        write_json(processes / LOST_WORKERS, given_up)

    rollout = recipe.rollout
    workers = WorkerProcesses(
        places_of(rollout.max_concurrent, rollout.workers),
        Limits.of(rollout).teardown,
        recipe.inference.start_timeout,
        lambda: servers_as_json(router),
        lost,
    )
    router.changed, router.sessions_elsewhere = workers.servers_changed, True
    return workers


async def until_over(
    controller: Controller,
    heartbeat_timeout: float,
    stopping: asyncio.Event,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Wait until the run is over, this process is told to stop, or the trainer is silent; returns the exit code.

    Args:
        controller: Controller of the run.
        heartbeat_timeout: Seconds after ``controller.last_beat`` at which the trainer counts as lost.
        stopping: Set when this process is told to stop.
        clock: Returns the seconds that ``controller.last_beat`` is measured in.
    """
    over = asyncio.create_task(_over(controller), name="end of the run")
    stop = asyncio.create_task(stopping.wait(), name="SIGTERM")
    try:
        while (left := controller.last_beat + heartbeat_timeout - clock()) > 0:
            await asyncio.wait({over, stop}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return STOPPED
            if over.done():
                return 0
    finally:
        over.cancel()
        stop.cancel()
        await asyncio.gather(over, stop, return_exceptions=True)
    silent = clock() - controller.last_beat
    print(
        f"no heartbeat from the trainer for {silent:.0f} s (launch.heartbeat_timeout={heartbeat_timeout:g}): the run "
        "ends",
        file=sys.stderr,
    )
    return LOST


async def _over(controller: Controller) -> None:
    await controller.finished.wait()
    await controller.trainer_done.wait()


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, and run the controller; returns its exit code."""
    parser = run_arguments("agentrl.launch.controller_process")
    parser.add_argument("--servers-file", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int)
    args = parser.parse_args(argv)
    begin(args.parent_pid)
    recipe = recipe_of_run(args.run_dir)
    work = serve(recipe, args.run_dir, args.model, args.servers_file, args.ready_file, resume=args.resume)
    code = 1  # also of an error that nobody foresaw
    try:
        code = bounded_run(work, Limits.of(recipe.rollout).teardown)
    except UserError as error:
        code = refuse(error)
    except InferenceError as error:
        print(error, file=sys.stderr)
    finally:
        end_within(END_SECONDS, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
