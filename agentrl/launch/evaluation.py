"""Runs an evaluation without training (``trainer.type=null``), on a server that the run starts or on any other.

Guarantees: no trainer is started and, with an external API, no model is loaded and torch is not imported; the API key
is read from the environment and written nowhere; it also runs where an event loop is running, as in a notebook. However
it ends, the score so far is shown, and ``resume`` goes on. Tasks of abandoned episodes do not keep the process from
ending.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from agentrl import __version__
from agentrl.config.recipe import Recipe
from agentrl.data.datasets import load_tasks
from agentrl.data.models import ResolvedModel
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.judged import EPISODES, RESULT, SETUP, read_judged
from agentrl.evaluate.metrics import EvalSummary
from agentrl.evaluate.power import power_line, until_line
from agentrl.evaluate.setup import shown_component
from agentrl.evaluate.stored import StoredEpisodes, TaskFile, TaskScoresByMetric, write_result
from agentrl.host.event_loop import EventLoop
from agentrl.host.process import write_json
from agentrl.inference.backend import Backend
from agentrl.inference.client import ChatClient, EvaluationClient
from agentrl.inference.kinds.kind import server_kind
from agentrl.inference.router import Router
from agentrl.launch.about import note_start
from agentrl.launch.bounded_run import BoundedRunner
from agentrl.launch.eval_progress import EvalProgress
from agentrl.launch.first_prompt import check_prompt
from agentrl.launch.loop_watch import LoopWatch, leave_or_exit
from agentrl.launch.model_shape import shape_of_folder
from agentrl.launch.paused_servers import take_over
from agentrl.launch.resolve import resolve
from agentrl.launch.results import EvalResult, Evaluation
from agentrl.launch.score import print_prompt, print_score
from agentrl.launch.servers import find_model, start_servers
from agentrl.launch.supervisor import ChildFailed, Supervisor
from agentrl.observe.say import say
from agentrl.observe.summary import setup_line
from agentrl.rollout.assemble import make_client, make_text_client, make_workflow
from agentrl.rollout.deadline import Limits
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal

TICK_SECONDS = 1.0
LOST = (
    "{} of {} episodes were lost: they count in no mean. To try them again: the same command with --output {} --resume"
)
LOOKED = "the accuracy's interval allows for the looks of eval.until_ci; the others are of a fixed number of tasks"
ABANDONED = (
    "{} abandoned: their teardown took longer than rollout.close_timeout; their `error` in the episodes names the line"
)


def evaluate_recipe(
    recipe: Recipe, run_dir: Path, console: Console, *, resume: bool = False, stays: bool = True
) -> EvalResult:
    """Run episodes of the validation tasks, print the result and return it.

    Args:
        recipe: Recipe of the evaluation.
        run_dir: Folder for its files.
        console: Console to print to.
        resume: Whether to take the episodes that the folder holds, if they are of the same set-up.
        stays: Whether the folder is there when this returns to the user; else no line names it.

    Raises:
        ChildFailed: A server failed, too many episodes were abandoned, or no further can succeed.
    """
    started = time.monotonic()
    in_text = not server_kind(recipe.inference.engine).capabilities.token_logprobs
    model = None
    if in_text and recipe.inference.urls:
        name = recipe.inference.model or recipe.model.name
        console.print(f"model   {name} at {recipe.inference.urls[0]}", highlight=False)
    else:
        model = find_model(recipe, console)
    recipe = resolve(recipe, shape_of_folder(model.path) if model is not None else None)
    write_json(run_dir / "config.json", recipe.model_dump(mode="json"))
    note_start(run_dir)
    supervisor = Supervisor(run_dir / "logs")
    journal = Journal(run_dir, episodes=recipe.logging.episodes)
    tasks = TaskFile(run_dir)
    keep = not recipe.logging.episodes  # else they are read from their file
    try:
        make_loop = partial(BoundedRunner, Limits.of(recipe.rollout).teardown)
        with EventLoop(make_loop) as loop:  # one loop: environments may keep connections
            end = partial(_leave, console, loop)
            if in_text or model is None:
                loaded = load_tasks(recipe.valid_dataset, seed=recipe.seed, env=recipe.env)
                urls = _urls(recipe, model, run_dir, supervisor)
                client = make_text_client(recipe, urls[0])
                evaluator = Evaluator(recipe, make_workflow(recipe), client, journal, loaded, keep=keep)
                work = _in_text(client, evaluator, recipe, run_dir, console, end, resume=resume)
            else:
                prompt = loop.run(check_prompt(recipe, model.path))
                if prompt.problem:
                    text = f"prompt  the first one could not be tried: {prompt.problem}"
                    console.print(text, style="yellow", markup=False)
                urls = _urls(recipe, model, run_dir, supervisor)
                served = make_client(recipe, model.path, urls)
                evaluator = Evaluator(recipe, make_workflow(recipe), served, journal, keep=keep)
                evaluator.prompt = prompt.text or None
                work = _with_servers(served, evaluator, recipe, run_dir, console, end, resume=resume)
            evaluator.on_task = tasks.add
            summary = loop.run(work)
    except RolloutError as error:
        raise ChildFailed(f"the evaluation ended: {error}") from error
    finally:
        supervisor.stop()
        journal.close()
        tasks.close()
    found = {"agentrl": __version__, **evaluator.as_json(summary)}
    print_prompt(found["setup"]["prompt"], console)
    print_score(recipe.name, evaluator, summary, console)
    try:
        write_result(run_dir / RESULT, {name: value for name, value in found.items() if name != "per_task"})
    except OSError as error:
        raise ChildFailed(
            f"{run_dir / RESULT} cannot be written: {error.strerror}; the score above is whole"
        ) from error
    if evaluator.ended_early:
        done = f"{evaluator.done} of {evaluator.total} episodes"
        console.print(f"ended   {evaluator.ended_early}; {done}", highlight=False, markup=False)
    if recipe.eval.until_ci is not None:
        console.print(LOOKED, highlight=False)
    if summary.abandoned:
        console.print(ABANDONED.format(summary.abandoned), style="red", markup=False, highlight=False)
    if summary.failed and recipe.logging.episodes and stays:
        lost = LOST.format(summary.failed, evaluator.total, run_dir)
        say(console, lost, "red")
    if stays:
        console.print(f"episodes in {run_dir / EPISODES}", highlight=False)
    return EvalResult(
        run_dir=run_dir,
        evaluation=Evaluation.of(0, found, {**found, "per_task": TaskScoresByMetric(run_dir)}),
        episodes=tuple(evaluator.ended) if keep else StoredEpisodes(run_dir),
        failures=dict(evaluator.failures),
        answers=found["answers"],
        notes=tuple(found["notes"]),
        data=evaluator.source,
        ended=evaluator.ended_early,
        seconds=time.monotonic() - started,
    )


def _urls(recipe: Recipe, model: ResolvedModel | None, run_dir: Path, supervisor: Supervisor) -> list[str]:
    """Returns the URLs of the recipe's servers, started if the recipe names none."""
    urls = list(recipe.inference.urls)
    if urls or model is None:
        return urls
    processes = run_dir / "processes"
    processes.mkdir(exist_ok=True)
    return start_servers(recipe, model.path, processes, supervisor)


async def _in_text(
    client: EvaluationClient,
    evaluator: Evaluator,
    recipe: Recipe,
    run_dir: Path,
    console: Console,
    end: Callable[[int], None],
    *,
    resume: bool,
) -> EvalSummary:
    try:
        return await _run(evaluator, recipe, run_dir, console, end, resume=resume)
    finally:
        await client.close()


async def _with_servers(
    client: ChatClient,
    evaluator: Evaluator,
    recipe: Recipe,
    run_dir: Path,
    console: Console,
    end: Callable[[int], None],
    *,
    resume: bool,
) -> EvalSummary:
    if recipe.inference.urls:
        await asyncio.gather(*(take_over(one, recipe.weights.lease_seconds) for one in client.router.backends))
    client.router.rejoin = partial(_take_back, client.router)
    client.router.start()
    try:
        return await _run(evaluator, recipe, run_dir, console, end, resume=resume)
    finally:
        await client.router.close()


async def _take_back(router: Router, backend: Backend) -> None:
    """Readmit a server that is back; no push is needed, because nothing is trained."""
    router.admit(backend)


async def _run(
    evaluator: Evaluator,
    recipe: Recipe,
    run_dir: Path,
    console: Console,
    end: Callable[[int], None],
    *,
    resume: bool,
) -> EvalSummary:
    """Run the evaluation; ``end`` is that of the :class:`LoopWatch`."""
    setup = evaluator.setup
    console.print(f"data    {evaluator.source}", highlight=False)
    who = f"{shown_component(setup['env'])}, agent {shown_component(setup['agent'])}"
    console.print(f"env     {who}", highlight=False, markup=False)
    console.print(f"sample  {setup_line(setup)}", highlight=False)
    if resume:
        evaluator.judged = read_judged(run_dir, setup)
        unread = f"; {evaluator.judged.unread} lines cannot be read, and are asked again" * (
            evaluator.judged.unread > 0
        )
        text = f"resume  {len(evaluator.judged)} of {evaluator.total} episodes are judged{unread}"
        console.print(text, highlight=False)
    else:
        console.print(f"power   {power_line(len(evaluator.tasks))}", highlight=False, markup=False)
        if recipe.eval.until_ci is not None:
            text = f"until   {until_line(recipe.eval.until_ci, len(evaluator.tasks))}"
            console.print(text, highlight=False, markup=False)
    write_json(run_dir / SETUP, setup)
    (run_dir / RESULT).unlink(missing_ok=True)  # of before a resume
    watch = LoopWatch.of(recipe.rollout, end=end).start(asyncio.get_running_loop())
    try:
        with EvalProgress(evaluator, console) as progress:
            ticks = asyncio.create_task(_ticking(progress))
            try:
                return await evaluator.run(0)
            finally:
                ticks.cancel()
    except (asyncio.CancelledError, RolloutError):
        _print_so_far(evaluator, recipe, run_dir, console)
        raise
    finally:
        watch.stop()


async def _ticking(progress: EvalProgress) -> None:
    """Has the progress shown also while no episode ends."""
    while True:
        await asyncio.sleep(TICK_SECONDS)
        progress.tick()


def _print_so_far(evaluator: Evaluator, recipe: Recipe, run_dir: Path, console: Console) -> None:
    """Prints the score of the episodes that ended, and how to go on with the others."""
    summary = evaluator.summary()
    if summary.n:
        console.print(f"\nso far, {evaluator.done} of {evaluator.total} episodes:", highlight=False)
        print_score(recipe.name, evaluator, summary, console)
    if summary.n and recipe.logging.episodes:
        again = f"go on with the same command and: --output {run_dir} --resume"
        console.print(again, highlight=False, markup=False, soft_wrap=True)


def _leave(console: Console, loop: EventLoop, code: int) -> None:
    """Ends the evaluation at once, with the cursor that the progress bar hid."""
    console.show_cursor(True)
    leave_or_exit(loop, code)
