"""A run from its recipe to its outputs: the way of ``agentrl recipe run``, :func:`agentrl.train` and the rest.

Guarantees: recipe errors that can be detected early are reported before a process starts; however the run ends
(success, a failing child, Ctrl-C), no process, port or shared memory remains; outputs are in ``runs/<name>/``.
"""

import contextlib
import itertools
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.hints import hints
from agentrl.config.mesh import check_mesh
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED
from agentrl.core.weight_manifest import sweep_stale
from agentrl.evaluate.judged import ASKED
from agentrl.evaluate.stored import TASKS
from agentrl.host.cpu_env import CPU_ENV
from agentrl.host.key_guard import KEY_ENV
from agentrl.host.process import write_json
from agentrl.host.stop_signals import STOP_SIGNAL_CODE, interruptible
from agentrl.inference.http import OPEN, Access
from agentrl.inference.template_source import template_text
from agentrl.launch import commands
from agentrl.launch.about import FILE as ABOUT
from agentrl.launch.about import note_start
from agentrl.launch.evaluation import evaluate_recipe
from agentrl.launch.fleet import Fleet
from agentrl.launch.live_watch import LiveWatch
from agentrl.launch.machines import HEAD_FILE
from agentrl.launch.model_check import start_model_check
from agentrl.launch.model_shape import shape_of_folder
from agentrl.launch.paused_servers import resume_paused
from agentrl.launch.placement import few_gpus, machines, placed, served_beyond, visible_gpus
from agentrl.launch.resolve import resolve
from agentrl.launch.results import (
    EvalResult,
    ExitReason,
    RunFailed,
    RunStopped,
    TrainResult,
    end_of,
    read_training,
)
from agentrl.launch.resume import RunError, check_resumable
from agentrl.launch.run_checks import check_components, check_disk, check_folder
from agentrl.launch.run_owner import FILE as OWNER
from agentrl.launch.run_owner import RunOwner
from agentrl.launch.save_and_stop import SAVED_CODE, SavedAndStopped, check_saved, on_request
from agentrl.launch.server_news import ServerNews
from agentrl.launch.servers import find_model, start_servers
from agentrl.launch.supervised_run import check_examples, train_on_examples
from agentrl.launch.supervisor import ChildFailed, ChildRefused, Supervisor
from agentrl.launch.teacher_servers import find_teacher, teacher_urls
from agentrl.launch.tracked import tracked
from agentrl.launch.worker_watch import WorkerWatch
from agentrl.observe.curve import draw_curve
from agentrl.observe.live import LiveView
from agentrl.observe.say import say
from agentrl.observe.sinks import MetricsTail
from agentrl.observe.summary import summary_table
from agentrl.train.checkpoint_state import CHAT_TEMPLATE, latest_checkpoint
from agentrl.train.controller_client import SECRET_ENV

REFUSED_CODE = 2  # of a command that was refused
SERVERS = "servers.json"  # file in the run's processes/ that tells the controller the servers' URLs


def run_recipe(
    recipe: Recipe,
    *,
    resume: bool,
    console: Console,
    numbered: bool = False,
    asked: Mapping[str, Any] | None = None,
) -> TrainResult | EvalResult:
    """Train with the recipe's trainer, or only evaluate if it has none.

    Args:
        recipe: The recipe as loaded; every ``auto`` is resolved here.
        resume: Whether to continue the run of this name.
        console: Console to print to.
        numbered: Whether ``-2``, ``-3``, ... is appended to a name that is taken (the user chose no name).
        asked: Request for an evaluation, which is kept in its folder.

    Raises:
        RunError: The run cannot start, or one of its processes cannot do what the recipe asks for.
        RunFailed: A process of the run failed.
        RunStopped: Ctrl-C, SIGTERM or SIGUSR1, after all processes have ended.
    """
    check_components(recipe)
    if recipe.trainer.type in SUPERVISED:
        check_examples(recipe)
    alone = machines(recipe) == 1  # other machines look for a run by its name
    folder = Path(recipe.launch.run_dir) / recipe.name
    with contextlib.ExitStack() as held:  # a resume asks first, because what is left to do changes while a run goes on
        owner = held.enter_context(RunOwner(folder)) if resume and folder.is_dir() else None
        recipe, run_dir = claim_run_dir(recipe, resume=resume, numbered=numbered and not resume and alone)
        owner = owner or held.enter_context(RunOwner(run_dir))
        if asked is not None:
            write_json(run_dir / ASKED, asked)
        return _run_owned(recipe, run_dir, owner, console, resume=resume)


def _run_owned(
    recipe: Recipe, run_dir: Path, owner: RunOwner, console: Console, *, resume: bool
) -> TrainResult | EvalResult:
    """Runs in a folder that no other process writes to."""
    for hint in hints(recipe):
        say(console, f"hint    {hint}", "yellow")
    trains, started = recipe.trainer.type is not None, time.monotonic()

    def reached(reason: ExitReason, error: str | None = None) -> TrainResult | None:
        seconds = time.monotonic() - started
        return read_training(run_dir, reason, seconds=seconds, error=error) if trains else None

    try:
        with interruptible(on_request(run_dir)):
            run = train_recipe if trains else evaluate_recipe
            result = run(recipe, run_dir, console, resume=resume)
        owner.end(0, "")
        return result
    except KeyboardInterrupt:
        owner.end(STOP_SIGNAL_CODE, "stopped")
        message = "\n".join(["stopped", *_how_to_continue(run_dir)])
        console.print(f"\n{message}", highlight=False, markup=False, soft_wrap=True)
        raise RunStopped(message, reached(ExitReason.STOPPED)) from None
    except SavedAndStopped:
        owner.end(SAVED_CODE, "saved and stopped, as SIGUSR1 asked")
        message = f"saved and stopped, as SIGUSR1 asked; continue: {again(run_dir)}"
        console.print(message, highlight=False, markup=False, soft_wrap=True)
        return read_training(run_dir, ExitReason.SAVED, seconds=time.monotonic() - started)
    except ChildRefused as error:
        owner.end(REFUSED_CODE, str(error))
        if not resume:
            shutil.rmtree(run_dir)  # nothing was made: its name is free again
        raise RunError(str(error)) from error
    except ChildFailed as error:
        owner.end(1, str(error))
        raise RunFailed(str(error), reached(ExitReason.FAILED, str(error))) from error
    finally:
        if not resume and _has_only_settings(run_dir):
            shutil.rmtree(run_dir)  # the run was refused; its name is free again


def again(run_dir: Path) -> str:
    """Command that continues a run with its own settings."""
    place = "" if run_dir.parent == Path("runs") else f" --run-dir {run_dir.parent}"
    return f"agentrl runs resume {run_dir.name}{place}"


def _has_only_settings(run_dir: Path) -> bool:
    files = [path for path in run_dir.rglob("*") if not path.is_dir()]
    settings = {"config.json", ABOUT, CHAT_TEMPLATE, OWNER, ASKED}
    written = {path.name for path in files if path.name != TASKS or path.stat().st_size}
    return run_dir.is_dir() and written <= settings


def _how_to_continue(run_dir: Path) -> list[str]:
    return [f"continue: {again(run_dir)}"] if latest_checkpoint(run_dir / "checkpoints") is not None else []


def train_recipe(recipe: Recipe, run_dir: Path, console: Console, *, resume: bool) -> TrainResult:
    """Start the run's processes, wait for their end, and print a report."""
    started = time.monotonic()
    model = find_model(recipe, console)
    check_folder(model.path)
    teacher = find_teacher(recipe, model.path, console)
    check_mesh(recipe.trainer, json.loads((model.path / "config.json").read_text()))
    recipe = resolve(recipe, shape_of_folder(model.path))
    check_disk(recipe, model.path, run_dir)
    write_json(run_dir / "config.json", recipe.model_dump(mode="json"))
    note_start(run_dir)
    template = template_text(recipe.model.chat_template, model.path, trust=recipe.model.trust_remote_code)
    (run_dir / CHAT_TEMPLATE).unlink(missing_ok=True)  # may be left from before a resume
    if template is not None:
        (run_dir / CHAT_TEMPLATE).write_text(template)  # the exported model gets it
    console.print(f"run     {run_dir}", highlight=False)
    supervisor = Supervisor(run_dir / "logs")
    try:
        with (
            tracked(recipe.logging.trackers, run_dir, lambda text: say(console, text, "yellow")),
            LiveWatch(run_dir) as watch,
            LiveView(recipe, run_dir, console, status=watch.latest) as view,
        ):
            if recipe.trainer.type in SUPERVISED:
                train_on_examples(recipe, model.path, run_dir, supervisor, view, resume=resume)
            else:
                _train(recipe, model.path, run_dir, supervisor, view, watch, resume=resume, teacher=teacher)
    finally:
        supervisor.stop()
        for problem in resume_paused(recipe, run_dir):
            say(console, problem, "red")
        (run_dir / "processes" / HEAD_FILE).unlink(missing_ok=True)  # no other machine comes any more
        sweep_stale()
        _draw(recipe, run_dir, console)
    result = read_training(run_dir, end_of(run_dir, recipe.trainer), seconds=time.monotonic() - started)
    _report(recipe, result, console)
    return result


def claim_run_dir(recipe: Recipe, *, resume: bool, numbered: bool) -> tuple[Recipe, Path]:
    """Create ``runs/<name>``, or find it on resume; two runs that start at once never share a folder.

    Returns:
        The recipe with the chosen name, and the folder.

    Raises:
        RunError: The name is taken, there is nothing to resume, or the folder cannot be created.
    """
    runs = Path(recipe.launch.run_dir)
    if resume:
        check_resumable(recipe, runs / recipe.name)
        return recipe, runs / recipe.name
    for number in itertools.count(1):
        name = recipe.name if number == 1 else f"{recipe.name}-{number}"
        try:
            (runs / name).mkdir(parents=True)
        except FileExistsError as error:
            if numbered:
                continue
            raise RunError(
                f"a run named {name!r} exists in {runs / name}: continue it with --resume, or choose another "
                "with name=NEW"
            ) from error
        except OSError as error:
            raise RunError(
                f"cannot make {runs / name}: {error.strerror}; choose another place with launch.run_dir=DIR"
            ) from error
        return recipe.model_copy(update={"name": name}), runs / name
    raise AssertionError


def _train(
    recipe: Recipe,
    model: Path,
    run_dir: Path,
    supervisor: Supervisor,
    view: LiveView,
    watch: LiveWatch,
    *,
    resume: bool,
    teacher: Path | None = None,
) -> None:
    shared_env = {SECRET_ENV: secrets.token_urlsafe(24), "TOKENIZERS_PARALLELISM": "false"}
    processes = run_dir / "processes"
    resume_paused(recipe, run_dir)  # left by a launcher that was killed
    shutil.rmtree(processes, ignore_errors=True)
    processes.mkdir(exist_ok=True)  # another machine may just have answered an earlier start there
    fleet = Fleet(recipe, model, run_dir, shared_env[SECRET_ENV], resume=resume)
    if served_beyond(recipe):
        shared_env[KEY_ENV] = shared_env[SECRET_ENV]
    try:
        _train_with(fleet, recipe, model, run_dir, supervisor, view, watch, shared_env, resume=resume, teacher=teacher)
    except ChildFailed as error:
        raise fleet.explained(error) from error
    finally:
        fleet.close()


def _train_with(
    fleet: Fleet,
    recipe: Recipe,
    model: Path,
    run_dir: Path,
    supervisor: Supervisor,
    view: LiveView,
    watch: LiveWatch,
    shared_env: dict[str, str],
    *,
    resume: bool,
    teacher: Path | None,
) -> None:
    processes = run_dir / "processes"
    view.state("starting the inference server and the controller")
    if shared := few_gpus(recipe, visible_gpus()):
        view.state(shared)
    ready = processes / "controller.json"
    controller = supervisor.start(  # it prepares itself, and finds wrong data or prompts, while the servers load
        "controller", commands.controller(recipe, model, run_dir, processes / SERVERS, ready, resume), env=shared_env
    )
    worker = partial(commands.rollout_worker, model, run_dir)
    here = range(0 if recipe.rollout.nodes else recipe.rollout.workers)
    workers = WorkerWatch(supervisor, here, worker, shared_env, processes)
    workers.start()
    start_model_check(recipe.trainer, model, run_dir, supervisor)
    urls = list(recipe.inference.urls)
    if placed(recipe):
        urls = fleet.server_urls(supervisor.check, view.state)
    elif not urls:
        host, access = "", OPEN
        if served_beyond(recipe):  # by rollout workers
            host, access = str(recipe.launch.head), Access(shared_env[KEY_ENV], recipe.launch.tls.ca)
        urls = start_servers(recipe, model, processes, supervisor, host=host, access=access)
    if teacher is not None:
        view.state("starting the teacher")
    write_json(processes / SERVERS, {"servers": urls, "teacher": teacher_urls(recipe, teacher, processes, supervisor)})
    view.state("starting the controller")
    announced = supervisor.wait_ready(controller, ready, recipe.inference.start_timeout)
    view.state(f"data: {announced['data']}")
    workers.wait_ready(recipe.inference.start_timeout)
    fleet.wait_workers(supervisor.check, view.state)
    fleet.serves_at(announced)
    meeting, meeting_env = fleet.meeting(supervisor.check, view.state)
    trainer = supervisor.start(
        "trainer",
        commands.trainer(recipe, model, run_dir, announced["url"], resume, meeting),
        env={**shared_env, **CPU_ENV, **meeting_env, "HF_HUB_OFFLINE": "1"},  # the controller may still need the hub
    )
    follow, news = MetricsTail(run_dir / "metrics.jsonl"), ServerNews(recipe.inference.patience)

    def poll() -> None:
        for record in follow.new():
            view.update(record)
        for text in supervisor.lost():
            view.state(f"the run continues, although {text}")
        for text in [*workers.poll(), *fleet.news(), *news.told(watch.latest().get("servers", ()))]:
            view.state(text)
        check_saved(run_dir)

    supervisor.wait([controller, trainer], poll)
    poll()


def _draw(recipe: Recipe, run_dir: Path, console: Console) -> None:
    """Draws the run's picture; a disk that has no room for it costs nothing else."""
    try:
        if (run_dir / "metrics.jsonl").is_file():
            draw_curve(run_dir / "metrics.jsonl", run_dir / _picture(recipe), title=recipe.name)
    except OSError as error:
        console.print(f"{run_dir / _picture(recipe)} could not be written: {error.strerror}", highlight=False)


def _picture(recipe: Recipe) -> str:
    return "loss.png" if recipe.trainer.type in SUPERVISED else "reward.png"


def _report(recipe: Recipe, result: TrainResult, console: Console) -> None:
    if result.before is not None and result.after is not None:
        by_step = {record["step"]: record for record in result.metrics}
        first, last = by_step[result.before.step], by_step[result.after.step]
        compared = {name: astuple(one) for name, one in result.changes.items()}
        console.print(summary_table(first, last, compared, result.after.setup))
    files = [_picture(recipe), "metrics.jsonl", "episodes.jsonl", "model/"]
    there = ", ".join(name for name in files if (result.run_dir / name).exists())
    console.print(f"done in {result.seconds / 60:.1f} min; outputs in {result.run_dir}: {there}")
