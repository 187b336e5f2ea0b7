"""Judges the saved transcripts of an evaluation again, with the environment or the reward function as it is now.

Guarantees: no model is asked; the evaluation's own folder is not changed; every episode that has a transcript is judged
anew, from its own task and seed, and keeps its messages, tokens, usage and times. One whose environment says something
else than it did then cannot be judged by this transcript, and counts as invalid with the reason.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl import __version__
from agentrl.config.errors import UserError
from agentrl.config.load import validate
from agentrl.config.overrides import parse_override, set_key
from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, Task
from agentrl.data.datasets import LoadedTasks
from agentrl.evaluate.compare import CompareError, compare
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.judged import EPISODES, RESULT, SETUP
from agentrl.evaluate.setup import setup_of
from agentrl.evaluate.stored import StoredEpisodes, TaskFile, TaskScoresByMetric, write_result
from agentrl.host.event_loop import EventLoop
from agentrl.host.process import write_json
from agentrl.inference.transcript import TranscriptClient
from agentrl.launch.about import note_start
from agentrl.launch.bounded_run import BoundedRunner
from agentrl.launch.compared import print_comparison
from agentrl.launch.results import EvalResult, Evaluation
from agentrl.launch.run_checks import check_names
from agentrl.launch.score import print_score
from agentrl.rollout.assemble import make_workflow
from agentrl.rollout.deadline import Limits
from agentrl.rollout.journal import Journal

_KEPT = ("trajectories", "seconds", "started", "version", "sampling")  # of the saved episode


def rescore(
    run_dir: Path, settings: Sequence[str] = (), *, output: Path | None = None, console: Console | None = None
) -> EvalResult:
    """Judges the episodes of an evaluation again.

    Args:
        run_dir: Folder of the evaluation.
        settings: Settings that differ from those of the evaluation: of ``env.kwargs``, ``reward``, ``eval.price``.
        output: Folder for the result; by default the evaluation's, with ``-rescored`` behind its name.
        console: Console to print to.

    Raises:
        UserError: There are no transcripts, a setting cannot be used, or the folder exists.
    """
    console = console or Console(highlight=False)
    saved = StoredEpisodes(run_dir)
    if not (run_dir / "config.json").is_file() or not len(saved):
        raise UserError(f"{run_dir} holds no transcripts: want the folder of an `agentrl eval`, with {EPISODES}")
    recipe = _recipe(run_dir, settings)
    check_names(recipe)
    folder = _new_folder(output or run_dir.with_name(f"{run_dir.name}-rescored"))
    numbers = _numbers(saved)
    samples, most = recipe.eval.samples, max(number for number, _ in numbers)
    tasks = [Task(id=f"none/{number}", data={}) for number in range(most + 1)]  # those without transcript stay so
    for (number, _), place in numbers.items():
        if tasks[number].id.startswith("none/"):
            tasks[number] = Task(id=saved[place].task_id, data=saved[place].task)
    places = {number * samples + index: place for (number, index), place in numbers.items()}
    client = TranscriptClient(lambda seed: saved[places[seed]] if seed in places else None)
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"tasks": None})})
    journal = _Keeping(folder, saved, places, samples)
    loaded = LoadedTasks(tasks, f"transcripts of {run_dir}")
    evaluator = Evaluator(recipe, make_workflow(recipe), client, journal, loaded, keep=False)
    evaluator.setup = setup_of(recipe, tasks, _data_of(run_dir)) | {"rescored": str(run_dir)}
    evaluator.wanted = lambda number, index: number * samples + index in places
    lines = TaskFile(folder)
    evaluator.on_task = lines.add
    write_json(folder / "config.json", recipe.model_dump(mode="json"))
    note_start(folder)
    write_json(folder / SETUP, evaluator.setup)
    try:
        with EventLoop(partial(BoundedRunner, Limits.of(recipe.rollout).teardown)) as loop:
            summary = loop.run(evaluator.run(0))
    finally:
        journal.close()
        lines.close()
    found = {"agentrl": __version__, **evaluator.as_json(summary)}
    write_result(folder / RESULT, found)
    print_score(f"{run_dir.name}, rescored", evaluator, summary, console)
    _print_change(run_dir, folder, console)
    return EvalResult(
        run_dir=folder,
        evaluation=Evaluation.of(0, found, {**found, "per_task": TaskScoresByMetric(folder)}),
        episodes=StoredEpisodes(folder),
        failures=dict(evaluator.failures),
        answers=found["answers"],
        data=loaded.source,
    )


class _Keeping(Journal):
    """Journal of episodes that keep the transcripts that they were judged by.

    Args:
        folder: Folder of the new evaluation.
        saved: The saved episodes.
        places: Their places by seed of the new evaluation.
        samples: Number of samples of each task.
    """

    def __init__(self, folder: Path, saved: StoredEpisodes, places: dict[int, int], samples: int) -> None:
        super().__init__(folder, episodes=True)
        self._saved, self._places, self._samples = saved, places, samples

    def episode(self, episode: Episode, *, evaluation_step: int | None = None) -> Episode:
        """Appends an episode with the transcript of the saved one."""
        old = self._saved[self._places[episode.seed]]
        kept: dict[str, Any] = {name: getattr(old, name) for name in _KEPT}
        return super().episode(episode.model_copy(update=kept), evaluation_step=evaluation_step)


def _recipe(run_dir: Path, settings: Sequence[str]) -> Recipe:
    import json

    data = json.loads((run_dir / "config.json").read_bytes())
    for setting in settings:
        data = set_key(data, *parse_override(setting))
    for name in ("until_ci", "max_cost", "max_total_tokens"):
        data.get("eval", {}).pop(name, None)  # all transcripts are judged
    return validate(data)


def _data_of(run_dir: Path) -> str:
    import json

    return json.loads((run_dir / SETUP).read_bytes()).get("data", "") if (run_dir / SETUP).is_file() else ""


def _numbers(saved: StoredEpisodes) -> dict[tuple[int, int], int]:
    """Returns the places of the saved episodes that have an answer, by number of the task and index."""
    found: dict[tuple[int, int], int] = {}
    for place in range(len(saved)):
        episode = saved[place]
        number = episode.group_id.rpartition("-")[2]
        if number.isdecimal() and any(one.nodes for one in episode.trajectories.values()):
            found[int(number), episode.index] = place
    if not found:
        raise UserError("no episode of that evaluation has an answer that could be judged")
    return found


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"{folder} exists: name another folder with --output") from error
    return folder


def _print_change(before: Path, after: Path, console: Console) -> None:
    try:
        found = compare(before, after)
    except CompareError as error:
        console.print(str(error), style="yellow", markup=False, highlight=False)
        return
    print_comparison(found, before, after, console)
