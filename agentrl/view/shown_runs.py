"""Finds the runs to show, and what their folders say about them.

Guarantees: folders are only read; what a folder of an older version or a damaged file does not give is absent, with a
sentence that says why. Two folders of one name get different keys. The evaluations of one call, which lie in a folder
of their own, are found like others.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.evaluate.judged import ASKED
from agentrl.host.cache_folder import cache_folder
from agentrl.view.episode_files import FILES
from agentrl.view.episode_index import EpisodeIndex
from agentrl.view.metric_history import FILE as METRICS
from agentrl.view.metric_history import MetricHistory

CONFIG = "config.json"
MARKS = (CONFIG, METRICS, *FILES.values(), "result.json")  # files that a run leaves


@dataclass
class ShownRun:
    """A run that is shown.

    Attributes:
        key: Name in links, unique among the shown runs.
        folder: Folder of the run.
        history: Metrics of the run.
        index: Index of the run's episodes.
    """

    key: str
    folder: Path
    history: MetricHistory = field(repr=False)
    index: EpisodeIndex = field(repr=False)

    def config(self) -> dict[str, Any]:
        """Returns the run's resolved recipe; empty without one that can be read."""
        return read_json(self.folder / CONFIG) or {}

    def summary(self) -> dict[str, Any]:
        """Returns what a list of runs shows, as plain data."""
        from agentrl.launch.run_folders import DAMAGED, run_info

        found: dict[str, Any] = {"key": self.key, "folder": str(self.folder)}
        try:
            info = run_info(self.folder)
            problem = {"problem": f"not all is known: {DAMAGED}"} if info.kind == DAMAGED else {}
            return found | info.as_json() | {"owner": None} | problem
        except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # an older folder
            self.history.update()
            steps = self.history.columns([])["step"]
            why = f"{type(error).__name__}: {error}"
            kind = {"kind": "", "state": "unknown", "step": steps[-1] if steps else None, "total": None}
            return found | kind | {"metric": None, "value": None, "age": None, "problem": f"not all is known: {why}"}


def read_json(file: Path) -> dict[str, Any] | None:
    """Reads a JSON object; ``None`` if the file is missing or is none."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_run(folder: Path) -> bool:
    """Whether a folder holds anything that a run leaves."""
    return any((folder / name).is_file() for name in MARKS)


def shown_runs(names: Sequence[str], runs: Path, cache: Path | None = None) -> list[ShownRun]:
    """Finds the runs to show.

    Args:
        names: Names or folders of runs; all runs below ``runs`` if there are none.
        runs: Folder of all runs.
        cache: Folder for the indexes.

    Raises:
        UserError: There is no such run, or no run at all.
    """
    folders = [one for name in names for one in find_folders(name, runs)] or sorted(
        (one for folder in runs.glob("*") for one in _runs_of(folder)), key=_wrote, reverse=True
    )
    if not folders:
        raise UserError(f"no runs in {runs}; name a run's folder: agentrl view RUN")
    home = cache or cache_folder() / "view"
    found: dict[str, ShownRun] = {}
    for folder in dict.fromkeys(one.resolve() for one in folders):
        key, number = folder.name, 1
        while key in found:
            number += 1
            key = f"{folder.name}-{number}"
        found[key] = ShownRun(key, folder, MetricHistory(folder), EpisodeIndex(folder, home))
    return list(found.values())


def find_folders(name: str, runs: Path) -> list[Path]:
    """Returns the folder of a run, or those of the evaluations of one call.

    Raises:
        UserError: There is no such run.
    """
    for folder in (Path(name), runs / name):
        if found := _runs_of(folder):
            return found
    return [find_folder(name, runs)]


def _runs_of(folder: Path) -> list[Path]:
    """Returns a folder that is a run, or the runs in one of several evaluations; nothing of any other."""
    if not folder.is_dir() or is_run(folder):
        return [folder] if folder.is_dir() else []
    several = (folder / ASKED).is_file()
    return sorted(file.parent for file in folder.glob(f"*/{CONFIG}")) if several else []


def find_folder(name: str, runs: Path) -> Path:
    """Returns the folder of a run or an evaluation, given by name or by path; one of an older version as well.

    Raises:
        UserError: There is no such run.
    """
    for folder in (Path(name), runs / name):
        if folder.is_dir() and is_run(folder):
            return folder
    if Path(name).is_dir():
        raise UserError(f"{name} is no run: it has none of {', '.join(MARKS)}")
    raise UserError(f"no run {name!r} in {runs}, and no folder {name}; agentrl runs list shows all")


def _wrote(folder: Path) -> float:
    return max((file.stat().st_mtime for name in MARKS if (file := folder / name).is_file()), default=0.0)
