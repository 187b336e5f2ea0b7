"""``agentrl recipe run``: a run from its recipe to its outputs.

Guarantees: recipe errors that can be detected early are reported before a process starts; however the run ends
(success, a failing child, Ctrl-C), no process, port or shared memory remains; outputs are in ``runs/<name>/``.
"""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.hints import hints
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import NO_ENV, SUPERVISED
from agentrl.config.teacher import as_teacher
from agentrl.core.registry import nearest, require
from agentrl.core.weight_manifest import sweep_stale
from agentrl.evaluate.paired import changes
from agentrl.host.cpu_env import CPU_ENV
from agentrl.host.process import write_json
from agentrl.inference.template_source import built_in_templates, template_text
from agentrl.inference.tool_parsers import PARSERS
from agentrl.launch import commands
from agentrl.launch.evaluation import evaluate_recipe
from agentrl.launch.model_check import start_model_check
from agentrl.launch.model_shape import shape_of_folder
from agentrl.launch.needed_packages import needed_packages, require_packages
from agentrl.launch.resolve import resolve
from agentrl.launch.resume import RunError, check_resumable
from agentrl.launch.run_owner import FILE as OWNER
from agentrl.launch.run_owner import RunOwner
from agentrl.launch.server_checks import check_servers
from agentrl.launch.servers import find_model, server_python, start_servers
from agentrl.launch.supervised_run import check_examples, train_on_examples
from agentrl.launch.supervisor import ChildFailed, Supervisor
from agentrl.launch.teacher_servers import find_teacher, teacher_urls
from agentrl.observe.curve import draw_curve
from agentrl.observe.live import LiveView
from agentrl.observe.sinks import MetricsTail, read_metrics
from agentrl.observe.summary import summary_table
from agentrl.rollout.assemble import make_workflow
from agentrl.train.checkpoint_state import CHAT_TEMPLATE, latest_checkpoint
from agentrl.train.controller_client import SECRET_ENV

SERVERS = "servers.json"  # file in the run's processes/ that tells the controller the servers' URLs
STOP_SIGNAL_CODE = 130  # the shell's code for a process ended by Ctrl-C


def run_recipe(recipe: Recipe, *, resume: bool, console: Console, numbered: bool = False) -> int:
    """Train with the recipe's trainer, or only evaluate if it has none.

    Args:
        recipe: The recipe as loaded; every ``auto`` is resolved here.
        resume: Whether to continue the run of this name.
        console: Console to print to.
        numbered: Whether ``-2``, ``-3``, ... is appended to a name that is taken (the user chose no name).

    Returns:
        Exit code: 0 after success, 1 if a process failed or no episode could be judged, 130 after Ctrl-C or SIGTERM.

    Raises:
        RunError: The run cannot start.
    """
    check_components(recipe)
    if recipe.trainer.type in SUPERVISED:
        check_examples(recipe)
    folder = Path(recipe.launch.run_dir) / recipe.name
    with contextlib.ExitStack() as held:  # a resume asks first, because what is left to do changes while a run goes on
        owner = held.enter_context(RunOwner(folder)) if resume and folder.is_dir() else None
        recipe, run_dir = claim_run_dir(recipe, resume=resume, numbered=numbered and not resume)
        owner = owner or held.enter_context(RunOwner(run_dir))
        return _run_owned(recipe, run_dir, owner, console, resume=resume)


def _run_owned(recipe: Recipe, run_dir: Path, owner: RunOwner, console: Console, *, resume: bool) -> int:
    """Runs in a folder that no other process writes to; returns the exit code."""
    for hint in hints(recipe):
        console.print(f"hint    {hint}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a shell's background job is started with SIGINT ignored
        signal.signal(signum, signal.default_int_handler)
    try:
        if recipe.trainer.type is None:
            code = evaluate_recipe(recipe, run_dir, console, resume=resume)
        else:
            code = train_recipe(recipe, run_dir, console, resume=resume)
        owner.end(code, "")
        return code
    except KeyboardInterrupt:
        owner.end(STOP_SIGNAL_CODE, "stopped")
        console.print("\nstopped")
        if latest_checkpoint(run_dir / "checkpoints") is not None:
            console.print(f"continue: {again(run_dir)}", highlight=False, markup=False, soft_wrap=True)
        return STOP_SIGNAL_CODE
    except ChildFailed as error:
        owner.end(1, str(error))
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    finally:
        if [path.name for path in run_dir.iterdir()] == [OWNER]:  # the run was refused before anything was written
            (run_dir / OWNER).unlink()
            run_dir.rmdir()


def again(run_dir: Path) -> str:
    """Command that continues a run with its own settings."""
    place = "" if run_dir.parent == Path("runs") else f" --run-dir {run_dir.parent}"
    return f"agentrl runs resume {run_dir.name}{place}"


def train_recipe(recipe: Recipe, run_dir: Path, console: Console, *, resume: bool) -> int:
    """Start the run's processes, wait for their end, and print a report; returns the exit code."""
    started = time.monotonic()
    model = find_model(recipe, console)
    teacher = find_teacher(recipe, model.path, console)
    recipe = resolve(recipe, shape_of_folder(model.path))
    check_disk(recipe, model.path, run_dir)
    write_json(run_dir / "config.json", recipe.model_dump(mode="json"))
    template = template_text(recipe.model.chat_template, model.path)
    (run_dir / CHAT_TEMPLATE).unlink(missing_ok=True)  # may be left from before a resume
    if template is not None:
        (run_dir / CHAT_TEMPLATE).write_text(template)  # the exported model gets it
    console.print(f"run     {run_dir}", highlight=False)
    supervisor = Supervisor(run_dir / "logs")
    try:
        with LiveView(recipe, run_dir, console) as view:
            if recipe.trainer.type in SUPERVISED:
                train_on_examples(recipe, model.path, run_dir, supervisor, view, resume=resume)
            else:
                _train(recipe, model.path, run_dir, supervisor, view, resume=resume, teacher=teacher)
    finally:
        supervisor.stop()
        sweep_stale()
        _draw(recipe, run_dir, console)
    _report(recipe, run_dir, console, time.monotonic() - started)
    return 0


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


def check_components(recipe: Recipe) -> None:
    """Run :func:`check_names`, and find the interpreters of the servers that the run starts.

    Raises:
        UserError: A component or an interpreter is missing.
    """
    check_names(recipe)
    if not recipe.inference.urls:
        server_python(recipe.inference)
    if recipe.teacher.model is not None and not recipe.teacher.urls:
        server_python(as_teacher(recipe).inference, "teacher")


def check_names(recipe: Recipe) -> None:
    """Import the recipe's components, make one environment, and check the capabilities of its servers.

    Raises:
        UserError: A name is unknown, a file cannot be imported, arguments do not fit, or a kind of server lacks a
            capability.
    """
    check_servers(recipe)
    require_packages(needed_packages(recipe))
    try:
        if recipe.env.id != NO_ENV:
            make_workflow(recipe)
        if recipe.trainer.type is not None:  # only looked up here, because importing them may need torch
            require("trainer", recipe.trainer.type)
            require("advantage", recipe.trainer.advantage)
            require("objective", recipe.trainer.objective)
    except (LookupError, ImportError, SyntaxError, TypeError, ValueError, TimeoutError) as error:
        raise RunError(str(error)) from error
    if recipe.trainer.compile and recipe.launch.device == "cpu" and not _has_compiler():
        raise RunError("trainer.compile needs a C++ compiler (g++, clang++ or $CXX) on a CPU, and none was found")
    parser, template = recipe.inference.tool_parser, recipe.model.chat_template
    if parser is not None and parser not in PARSERS:
        hint = nearest(parser, list(PARSERS))
        raise RunError(f"inference.tool_parser={parser}: unknown{hint}; known: {', '.join(PARSERS)}")
    ours = list(built_in_templates())
    if template not in (None, "training", *ours) and not Path(str(template)).is_file():
        raise RunError(
            f"model.chat_template={template}: no such file{nearest(str(template), ours)} (a Jinja file, training for "
            f"TRL's, or one of ours: {', '.join(ours)})"
        )


def _has_compiler() -> bool:
    return bool(os.environ.get("CXX")) or any(map(shutil.which, ("g++", "clang++", "c++")))


def check_disk(recipe: Recipe, model: Path, run_dir: Path) -> None:
    """Refuse a run if the disk has too little space for its checkpoints.

    Raises:
        RunError: The disk has too little free space.
    """
    parameters = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    checkpoints = (
        3 * parameters * (recipe.trainer.keep_checkpoints + 1)
    )  # parameters and two moments; one more while writing
    if recipe.trainer.lora_rank is not None and recipe.trainer.advantage != "gae":
        checkpoints = 0  # adapters are small; a critic (gae) is not
    needed = checkpoints + parameters
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise RunError(
            f"{run_dir} has {free / 1e9:.1f} GB free, checkpoints and the exported model need up to "
            f"{needed / 1e9:.1f} GB: free some space, or choose another place with launch.run_dir=DIR"
        )


def _train(
    recipe: Recipe,
    model: Path,
    run_dir: Path,
    supervisor: Supervisor,
    view: LiveView,
    *,
    resume: bool,
    teacher: Path | None = None,
) -> None:
    shared_env = {SECRET_ENV: secrets.token_urlsafe(24), "TOKENIZERS_PARALLELISM": "false"}
    processes = run_dir / "processes"
    shutil.rmtree(processes, ignore_errors=True)
    processes.mkdir()
    view.state("starting the inference server and the controller")
    ready = processes / "controller.json"
    controller = supervisor.start(  # it prepares itself, and finds wrong data or prompts, while the servers load
        "controller", commands.controller(recipe, model, run_dir, processes / SERVERS, ready, resume), env=shared_env
    )
    start_model_check(recipe.trainer, model, run_dir, supervisor)
    urls = list(recipe.inference.urls) or start_servers(recipe, model, processes, supervisor)
    if teacher is not None:
        view.state("starting the teacher")
    write_json(processes / SERVERS, {"servers": urls, "teacher": teacher_urls(recipe, teacher, processes, supervisor)})
    view.state("starting the controller")
    announced = supervisor.wait_ready(controller, ready, recipe.inference.start_timeout)
    view.state(f"data: {announced['data']}")
    trainer = supervisor.start(
        "trainer",
        commands.trainer(recipe, model, run_dir, announced["url"], resume),
        env={**shared_env, **CPU_ENV, "HF_HUB_OFFLINE": "1"},  # the controller may still need the hub
    )
    follow = MetricsTail(run_dir / "metrics.jsonl")

    def poll() -> None:
        for record in follow.new():
            view.update(record)
        for text in supervisor.lost():
            view.state(f"the run continues, although {text}")

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


def _report(recipe: Recipe, run_dir: Path, console: Console, seconds: float) -> None:
    records = read_metrics(run_dir / "metrics.jsonl")
    evaluations = [record for record in records if any(name.startswith("eval/") for name in record)]
    if len(evaluations) >= 2:
        first, last = evaluations[0], evaluations[-1]
        found = [_evaluation(run_dir, record) for record in (first, last)]
        compared = {name: astuple(one) for name, one in changes(*(one.get("per_task", {}) for one in found)).items()}
        console.print(summary_table(first, last, compared, found[-1].get("setup", {})))
    files = [_picture(recipe), "metrics.jsonl", "episodes.jsonl", "model/"]
    there = ", ".join(name for name in files if (run_dir / name).exists())
    console.print(f"done in {seconds / 60:.1f} min; outputs in {run_dir}: {there}")


def _evaluation(run_dir: Path, record: Mapping[str, float]) -> dict[str, Any]:
    """Reads what an evaluation wrote beside its record; nothing where no task was sampled."""
    path = run_dir / f"eval-{int(record['step']):06d}.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}
