"""Runs supervised training: one torchrun child, with an evaluation in the environment before and after it.

Guarantees: no server or controller runs beside the trainer; the evaluations are those of a run that learns from
episodes, on the same tasks and with the same keys in the same files.
"""

import asyncio
import json
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import evaluates
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.metrics import EvalSummary
from agentrl.host.cpu_env import CPU_ENV
from agentrl.host.event_loop import EventLoop
from agentrl.host.process import write_json
from agentrl.inference.backend import Backend
from agentrl.inference.router import Router
from agentrl.launch import commands
from agentrl.launch.bounded_run import BoundedRunner
from agentrl.launch.fleet import Fleet
from agentrl.launch.loop_watch import LoopWatch, leave_or_exit
from agentrl.launch.resume import only_evaluates
from agentrl.launch.servers import start_servers
from agentrl.launch.supervisor import ChildFailed, Supervisor
from agentrl.observe.live import LiveView
from agentrl.observe.sinks import MetricsTail, MetricsWriter, read_metrics
from agentrl.rollout.assemble import make_client, make_workflow
from agentrl.rollout.deadline import Limits
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal
from agentrl.supervised.examples import load_examples, load_held_out, named

ENV = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}


def check_examples(recipe: Recipe) -> None:
    """Read all examples once, so that incomplete ones are reported before any process starts.

    Raises:
        DataError: An example lacks a text that ``trainer.type`` needs.
    """
    load_examples(recipe, recipe.train_dataset)
    load_held_out(recipe)


def train_on_examples(
    recipe: Recipe, model: Path, run_dir: Path, supervisor: Supervisor, view: LiveView, *, resume: bool
) -> None:
    """Evaluate the starting model, train, and evaluate the result."""
    processes = run_dir / "processes"
    shutil.rmtree(processes, ignore_errors=True)
    processes.mkdir()
    fleet = Fleet(recipe, model, run_dir, secrets.token_urlsafe(24), resume=resume)
    try:
        _train_on_examples(recipe, model, run_dir, supervisor, view, fleet, resume=resume)
    except ChildFailed as error:
        raise fleet.explained(error) from error
    finally:
        fleet.close()


def _train_on_examples(
    recipe: Recipe,
    model: Path,
    run_dir: Path,
    supervisor: Supervisor,
    view: LiveView,
    fleet: Fleet,
    *,
    resume: bool,
) -> None:
    processes = run_dir / "processes"
    follow = MetricsTail(run_dir / "metrics.jsonl")
    data = processes / "trainer.json"
    shown = False

    def poll() -> None:
        nonlocal shown
        if not shown and data.is_file():
            shown = True
            view.state(json.loads(data.read_text())["data"])
        for record in follow.new():
            view.update(record)

    if evaluates(recipe) and not resume:
        view.state("evaluating before the training, on an inference server")
        evaluate_weights(recipe, model, run_dir, supervisor, 0)
        poll()
    if not (resume and only_evaluates(recipe, run_dir)):
        view.state("starting the trainer")
        meeting, meeting_env = fleet.meeting(supervisor.check, view.state)
        command = commands.examples_trainer(recipe, model, run_dir, data, resume, meeting)
        child = supervisor.start("trainer", command, env={**ENV, **CPU_ENV, **meeting_env})
        supervisor.wait([child], poll)
        poll()
    if evaluates(recipe):
        supervisor.stop()
        view.state("evaluating the trained model")
        step = max(int(record["step"]) for record in read_metrics(run_dir / "metrics.jsonl"))
        evaluate_weights(recipe, run_dir / "model", run_dir, supervisor, step)
        poll()


def evaluate_weights(recipe: Recipe, model: Path, run_dir: Path, supervisor: Supervisor, step: int) -> None:
    """Evaluate a model on the held-out tasks, with servers that are started for it and stopped afterwards.

    Args:
        recipe: The run's resolved recipe.
        model: Folder of the model to evaluate.
        run_dir: The run's folder, which gets the episodes, ``eval-<step>.json`` and a record of ``metrics.jsonl``.
        supervisor: Supervisor that starts and stops the servers.
        step: Number of trainer steps before the evaluation.

    Raises:
        ChildFailed: A server did not start, no episode could be judged, or too many were abandoned.
    """
    recipe = recipe.model_copy(update={"valid_dataset": named(recipe.valid_dataset)})
    (run_dir / "processes" / "server-0.json").unlink(missing_ok=True)  # left from the evaluation before
    urls = start_servers(recipe, model, run_dir / "processes", supervisor)
    journal = Journal(run_dir, episodes=recipe.logging.episodes)
    try:
        with EventLoop(partial(BoundedRunner, Limits.of(recipe.rollout).teardown)) as loop:
            summary, found, failures = loop.run(
                _episodes(recipe, model, urls, journal, step, partial(leave_or_exit, loop))
            )
    except RolloutError as error:
        raise ChildFailed(f"the evaluation ended: {error}") from error
    finally:
        journal.close()
        supervisor.stop()
    if not summary.n:
        raise ChildFailed(f"no held-out task could be judged: {failures}")
    metrics = summary.as_metrics()
    write_json(run_dir / f"eval-{step:06d}.json", found)
    writer = MetricsWriter(run_dir, tensorboard=recipe.logging.tensorboard)
    writer.write(step, metrics)
    writer.close()


async def _episodes(
    recipe: Recipe, model: Path, urls: list[str], journal: Journal, step: int, end: Callable[[int], None]
) -> tuple[EvalSummary, dict[str, Any], str]:
    client = make_client(recipe, model, urls)
    client.router.rejoin = partial(_take_back, client.router)
    client.router.start()
    watch = LoopWatch.of(recipe.rollout, end=end).start(asyncio.get_running_loop())
    try:
        evaluator = Evaluator(recipe, make_workflow(recipe), client, journal)
        summary = await evaluator.run(step)
    finally:
        watch.stop()
        await client.router.close()
    return summary, evaluator.as_json(summary), "; ".join(text[-300:] for text, _ in evaluator.failures.most_common(3))


async def _take_back(router: Router, backend: Backend) -> None:
    """Readmit a server that is back; no push is needed, because its weights have not changed."""
    router.admit(backend)
