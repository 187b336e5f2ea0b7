"""Runs an evaluation without training (``trainer.type=null``), on a server that the run starts or on any other.

Guarantees: no trainer is started and, with an external API, no model is loaded and torch is not imported; the API key
is read from the environment and written nowhere; it also runs where an event loop is running, as in a notebook. Tasks
of abandoned episodes do not keep the process from ending.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode
from agentrl.data.models import ResolvedModel
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.metrics import EvalSummary
from agentrl.host.event_loop import EventLoop
from agentrl.host.process import write_json
from agentrl.inference.backend import Backend
from agentrl.inference.kinds.kind import server_kind
from agentrl.inference.router import Router
from agentrl.launch.bounded_run import BoundedRunner
from agentrl.launch.first_prompt import check_prompt
from agentrl.launch.loop_watch import LoopWatch, leave_or_exit
from agentrl.launch.model_shape import shape_of_folder
from agentrl.launch.resolve import resolve
from agentrl.launch.results import EvalResult, Evaluation
from agentrl.launch.servers import find_model, start_servers
from agentrl.launch.supervisor import ChildFailed, Supervisor
from agentrl.observe.summary import evaluation_table, setup_line
from agentrl.rollout.assemble import make_client, make_text_client, make_workflow
from agentrl.rollout.deadline import Limits
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal

EPISODES = "eval-episodes.jsonl"
ABANDONED = (
    "{} abandoned: their teardown took longer than rollout.close_timeout; their `error` in the episodes names the line"
)


def evaluate_recipe(recipe: Recipe, run_dir: Path, console: Console) -> EvalResult:
    """Run episodes of the validation tasks, print the result and return it."""
    started, episodes = time.monotonic(), list[Episode]()
    in_text = not server_kind(recipe.inference.engine).capabilities.token_logprobs
    model = None
    if in_text and recipe.inference.urls:
        name = recipe.inference.model or recipe.model.name
        console.print(f"model   {name} at {recipe.inference.urls[0]}", highlight=False)
    else:
        model = find_model(recipe, console)
    recipe = resolve(recipe, shape_of_folder(model.path) if model is not None else None)
    write_json(run_dir / "config.json", recipe.model_dump(mode="json"))
    supervisor = Supervisor(run_dir / "logs")
    journal = Journal(run_dir, episodes=recipe.logging.episodes)
    try:
        make_loop = partial(BoundedRunner, Limits.of(recipe.rollout).teardown)
        with EventLoop(make_loop) as loop:  # one loop: environments may keep connections
            end = partial(_leave, console, loop)
            if in_text or model is None:
                urls = _urls(recipe, model, run_dir, supervisor)
                evaluator, summary = loop.run(_in_text(recipe, urls[0], journal, console, episodes, end))
            else:
                problem = loop.run(check_prompt(recipe, model.path)).problem
                if problem:
                    console.print(f"prompt  the first one could not be tried: {problem}", style="yellow", markup=False)
                urls = _urls(recipe, model, run_dir, supervisor)
                evaluator, summary = loop.run(_with_servers(recipe, model.path, urls, journal, console, episodes, end))
    except RolloutError as error:
        raise ChildFailed(f"the evaluation ended: {error}") from error
    finally:
        supervisor.stop()
        journal.close()
    found = evaluator.as_json(summary)
    write_json(run_dir / "result.json", found)
    console.print(evaluation_table(summary.as_metrics(), title=f"{recipe.name}: {summary.tasks} tasks"))
    for text, count in evaluator.failures.most_common(3):
        console.print(f"{count} invalid: {text[-600:]}", style="red", markup=False)
    if summary.abandoned:
        console.print(ABANDONED.format(summary.abandoned), style="red", markup=False, highlight=False)
    console.print(f"episodes in {run_dir / EPISODES}", highlight=False)
    return EvalResult(
        run_dir=run_dir,
        evaluation=Evaluation.of(0, found, found),
        episodes=tuple(episodes),
        failures=dict(evaluator.failures),
        data=evaluator.source,
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
    recipe: Recipe, url: str, journal: Journal, console: Console, episodes: list[Episode], end: Callable[[int], None]
) -> tuple[Evaluator, EvalSummary]:
    evaluator = Evaluator(recipe, make_workflow(recipe), make_text_client(recipe, url), journal)
    return await _run(evaluator, recipe, console, episodes, end)


async def _with_servers(
    recipe: Recipe,
    model: Path,
    urls: list[str],
    journal: Journal,
    console: Console,
    episodes: list[Episode],
    end: Callable[[int], None],
) -> tuple[Evaluator, EvalSummary]:
    client = make_client(recipe, model, urls)
    client.router.rejoin = partial(_take_back, client.router)
    client.router.start()
    try:
        evaluator = Evaluator(recipe, make_workflow(recipe), client, journal)
        return await _run(evaluator, recipe, console, episodes, end)
    finally:
        await client.router.close()


async def _take_back(router: Router, backend: Backend) -> None:
    """Readmit a server that is back; no push is needed, because nothing is trained."""
    router.admit(backend)


async def _run(
    evaluator: Evaluator, recipe: Recipe, console: Console, episodes: list[Episode], end: Callable[[int], None]
) -> tuple[Evaluator, EvalSummary]:
    """Run the evaluation; every ended episode is added to ``episodes``. ``end`` is that of the :class:`LoopWatch`."""
    console.print(f"data    {evaluator.source}", highlight=False)
    console.print(f"sample  {setup_line(evaluator.setup)}", highlight=False)
    columns = ("episodes", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("", total=evaluator.total)

        def ended(episode: Episode) -> None:
            episodes.append(episode)
            bar.advance(row)

        evaluator.on_episode = ended
        watch = LoopWatch.of(recipe.rollout, end=end).start(asyncio.get_running_loop())
        try:
            summary = await evaluator.run(0)
        finally:
            watch.stop()
    return evaluator, summary


def _leave(console: Console, loop: EventLoop, code: int) -> None:
    """Ends the evaluation at once, with the cursor that the progress bar hid."""
    console.show_cursor(True)
    leave_or_exit(loop, code)
