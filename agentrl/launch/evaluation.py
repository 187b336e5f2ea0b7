"""Runs an evaluation without training (``trainer.type=null``), on a server that the run starts or on any other.

Guarantees: no trainer is started and, with an external API, no model is loaded and torch is not imported; the API key
is read from the environment and written nowhere; it also runs where an event loop is running, as in a notebook.
"""

import time
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.metrics import EvalSummary
from agentrl.host.event_loop import EventLoop
from agentrl.host.process import write_json
from agentrl.inference.backend import Backend
from agentrl.inference.kinds.kind import server_kind
from agentrl.inference.router import Router
from agentrl.launch.model_shape import shape_of_folder
from agentrl.launch.resolve import resolve
from agentrl.launch.results import EvalResult, Evaluation
from agentrl.launch.servers import find_model, start_servers
from agentrl.launch.supervisor import Supervisor
from agentrl.observe.summary import evaluation_table, setup_line
from agentrl.rollout.assemble import make_client, make_text_client, make_workflow
from agentrl.rollout.journal import Journal

EPISODES = "eval-episodes.jsonl"


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
        urls = list(recipe.inference.urls)
        if model is not None and not urls:
            processes = run_dir / "processes"
            processes.mkdir(exist_ok=True)
            urls = start_servers(recipe, model.path, processes, supervisor)
        with EventLoop() as loop:
            if in_text or model is None:
                work = _in_text(recipe, urls[0], journal, console, episodes)
            else:
                work = _with_servers(recipe, model.path, urls, journal, console, episodes)
            evaluator, summary = loop.run(work)
    finally:
        supervisor.stop()
        journal.close()
    found = evaluator.as_json(summary)
    write_json(run_dir / "result.json", found)
    console.print(evaluation_table(summary.as_metrics(), title=f"{recipe.name}: {summary.tasks} tasks"))
    for text, count in evaluator.failures.most_common(3):
        console.print(f"{count} invalid: {text[-600:]}", style="red", markup=False)
    console.print(f"episodes in {run_dir / EPISODES}", highlight=False)
    return EvalResult(
        run_dir=run_dir,
        evaluation=Evaluation.of(0, found, found),
        episodes=tuple(episodes),
        failures=dict(evaluator.failures),
        data=evaluator.source,
        seconds=time.monotonic() - started,
    )


async def _in_text(
    recipe: Recipe, url: str, journal: Journal, console: Console, episodes: list[Episode]
) -> tuple[Evaluator, EvalSummary]:
    evaluator = Evaluator(recipe, make_workflow(recipe), make_text_client(recipe, url), journal)
    return await _run(evaluator, console, episodes)


async def _with_servers(
    recipe: Recipe, model: Path, urls: list[str], journal: Journal, console: Console, episodes: list[Episode]
) -> tuple[Evaluator, EvalSummary]:
    client = make_client(recipe, model, urls)
    client.router.rejoin = partial(_take_back, client.router)
    client.router.start()
    try:
        return await _run(Evaluator(recipe, make_workflow(recipe), client, journal), console, episodes)
    finally:
        await client.router.close()


async def _take_back(router: Router, backend: Backend) -> None:
    """Readmit a server that is back; no push is needed, because nothing is trained."""
    router.admit(backend)


async def _run(evaluator: Evaluator, console: Console, episodes: list[Episode]) -> tuple[Evaluator, EvalSummary]:
    """Run the evaluation; every ended episode is added to ``episodes``."""
    console.print(f"data    {evaluator.source}", highlight=False)
    console.print(f"sample  {setup_line(evaluator.setup)}", highlight=False)
    columns = ("episodes", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("", total=evaluator.total)

        def ended(episode: Episode) -> None:
            episodes.append(episode)
            bar.advance(row)

        evaluator.on_episode = ended
        summary = await evaluator.run(0)
    return evaluator, summary
