"""Findings of ``agentrl doctor`` on a run, with links to the episodes that show it.

Guarantees: the run is examined in a process of its own, because that reads all of its episodes; it is examined anew
only when its files have grown.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.evaluate.answers import Kind
from agentrl.observe.examine_run import METRICS, examine
from agentrl.view.episode_files import FILES

EPISODE_LINKS = {
    "invalid": ("eval", "is:failed", "-place"),
    "failed": ("train", "is:failed", "-place"),
    "truncation": ("train", "stop:length", "-length"),
    "all_cut": ("train", "stop:length", "-length"),
    "length": ("train", "", "-length"),
    "collapse": ("train", "", "length"),
    "overflow": ("train", "stop:context_overflow", "-context"),
    "too_old": ("train", "", "-age"),
    "filtered": ("train", "-is:trained", "-place"),
    "form": ("train", "accuracy=0", "-reward"),
    "proxy": ("train", "accuracy=0", "-reward"),
    "signal": ("train", "", "-place"),
    "masks": ("train", "length=0", "-place"),
}
"""Kind of a finding about a training -> episodes that show it: kind of episodes, query and sort."""
EVALUATION_LINKS = {
    "invalid": ("eval", "is:failed", "-place"),
    **{kind.value: ("eval", f"is:{kind.value}", "-length") for kind in Kind},
    "wide": ("eval", "", "-place"),
}
"""The same about the evaluation of a folder without training."""
SECONDS = 600.0  # for one examination


class Findings:
    """Examinations of the shown runs."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._lock = threading.Lock()  # one examination at a time

    def of(self, folder: Path) -> dict[str, Any]:
        """Returns the findings of a run, and what could not be judged."""
        with self._lock:
            sizes = _sizes(folder)
            if folder not in self._known or self._known[folder][0] != sizes:
                self._known[folder] = sizes, _examined(folder)
            return self._known[folder][1]


def _sizes(folder: Path) -> tuple[int, ...]:
    files = (folder / name for name in (METRICS, "result.json", *FILES.values(), "failed-episodes.jsonl"))
    return tuple(file.stat().st_size if file.is_file() else 0 for file in files)


def _examined(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "agentrl.view.findings", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"findings": [], "unjudged": [f"the examination took longer than {SECONDS:.0f} s"]}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"findings": [], "unjudged": [f"agentrl doctor cannot examine the run: {last[0]}"]}
    return json.loads(done.stdout)


def findings(folder: Path) -> dict[str, Any]:
    """Examines a run here and now."""
    try:
        found, unjudged = examine(folder)
    except UserError as error:
        return {"findings": [], "unjudged": [str(error)]}
    names = ("kind", "symptom", "cause", "remedy", "level")
    links = EPISODE_LINKS if (folder / METRICS).is_file() else EVALUATION_LINKS
    shown = [{**{name: getattr(one, name) for name in names}, "episodes": _link(links.get(one.kind))} for one in found]
    return {"findings": shown, "unjudged": unjudged}


def _link(found: tuple[str, str, str] | None) -> dict[str, str] | None:
    return None if found is None else dict(zip(("kind", "query", "sort"), found, strict=True))


if __name__ == "__main__":
    print(json.dumps(findings(Path(sys.argv[1]))))
