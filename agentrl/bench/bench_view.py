"""Measures ``agentrl view`` on a run of 100,000 episodes: how long until the first page, and until everything is found.

Guarantees: the command runs as a user's would, in a process of its own, with nothing indexed before; the clock of the
first page starts when the link is opened, and stops when all that it shows has arrived, rows included, while the rest
is still being read.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from agentrl.bench.made_run import make_run

EPISODES = 100_000
RARE = "945 + 615"  # a text of a few episodes
READ_SECONDS = 300.0  # for the whole index


def run(episodes: int = EPISODES, repeats: int = 5) -> dict[str, list[float]]:
    """Measure ``repeats`` times.

    Args:
        episodes: Episodes of the run.
        repeats: Number of measurements, each with nothing indexed before.

    Returns:
        ``first_page_s``: seconds from opening the link to the first page with its rows; ``command_s``: from the start
        of the command to the link; ``indexed_s``: from the first page until all episodes are read; ``sorted_page_s``:
        a page in the middle of the table, sorted by length; ``search_s``: a page with the episodes that hold a text.
    """
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-view-") as home:
        folder = make_run(Path(home) / "runs" / "made", episodes)
        for repeat in range(repeats):
            for name, value in _measure(folder, Path(home) / f"cache{repeat}", episodes).items():
                figures.setdefault(name, []).append(value)
    return figures


@contextmanager
def viewed(names: Sequence[str], runs: Path, cache: Path) -> Iterator[tuple[str, float]]:
    """Starts ``agentrl view`` on some runs; yields its link and the seconds until it was printed.

    Args:
        names: Names of the runs.
        runs: Folder of the runs.
        cache: Folder for the indexes.
    """
    command = [sys.executable, "-m", "agentrl", "view", *names, "--run-dir", str(runs), "--port", "0"]
    began = time.perf_counter()
    env = {**os.environ, "AGENTRL_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise RuntimeError("agentrl view printed no link")
            yield found[0], time.perf_counter() - began
        finally:
            process.terminate()


def _measure(folder: Path, cache: Path, episodes: int) -> dict[str, float]:
    with (
        viewed([folder.name], folder.parent, cache) as (link, command),
        httpx.Client(trust_env=False, follow_redirects=True, timeout=60) as client,
    ):
        base = link.split("/?")[0]
        table = f"{base}/api/runs/{folder.name}/episodes"
        began = time.perf_counter()
        _got(client, link)
        for path in ("/view.js", "/view.css", "/api/runs", f"/api/runs/{folder.name}"):
            _got(client, base + path)
        rows = _got(client, table, kind="train", sort="-place", offset="0", limit="100").json()["rows"]
        first = time.perf_counter() - began
        if len(rows) != 100:
            raise RuntimeError(f"the first page has {len(rows)} rows")
        while _got(client, table, limit="1").json()["all"] < episodes:
            if time.perf_counter() - began > READ_SECONDS:
                raise RuntimeError(f"not all episodes were read within {READ_SECONDS:g} s")
            time.sleep(0.2)
        indexed = time.perf_counter() - began
        middle = _timed(client, table, sort="-length", offset=str(episodes // 2), limit="100")
        search = _timed(client, table, q=f'"{RARE}"', limit="100")
    return {
        "first_page_s": first, "command_s": command, "indexed_s": indexed, "sorted_page_s": middle, "search_s": search,
    }  # fmt: skip


def _got(client: httpx.Client, url: str, **query: str) -> httpx.Response:
    return client.get(url, params=query or None).raise_for_status()


def _timed(client: httpx.Client, url: str, **query: str) -> float:
    began = time.perf_counter()
    _got(client, url, **query)
    return time.perf_counter() - began
