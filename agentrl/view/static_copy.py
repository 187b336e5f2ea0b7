"""Writes a selection of runs as one page that needs no server.

Guarantees: the file loads nothing and runs no script but its own; what it holds is what the page would show of the
same selection, the newest or best-sorted episodes up to a limit, and it says how many there are.
"""

import html
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from agentrl.config.errors import UserError
from agentrl.view.answers import Answers
from agentrl.view.episode_files import KINDS
from agentrl.view.page_files import whole_document
from agentrl.view.shown_runs import ShownRun

_KEPT = "!~*'()"  # what the page's own encoding of an address leaves as it is


def write_copy(runs: list[ShownRun], file: Path, *, query: str = "", sort: str = "-place", limit: int = 200) -> int:
    """Writes the page.

    Args:
        runs: The runs to show.
        file: HTML file to write.
        query: Filter of the episodes, see :mod:`agentrl.view.search_query`.
        sort: Field to sort by; with ``-`` the largest first.
        limit: Most episodes of each run and kind.

    Returns:
        The number of episodes in the file.

    Raises:
        UserError: The query cannot be read, or the file cannot be written.
    """
    answers = Answers(runs)
    found: dict[str, Any] = {"/api/runs": answers.list_runs()}
    count = 0
    for key, run in answers.runs.items():
        run.index.update()
        count += _of_run(answers, key, found, query, sort, limit)
    about = f"{count} episodes" + (f" that fit {query}" if query else "")
    names = ", ".join(answers.runs)
    text = whole_document(
        html.escape(f"{names} · agentrl view"), orjson.dumps({"answers": found, "about": about}).decode()
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    return count


def _of_run(answers: Answers, key: str, found: dict[str, Any], query: str, sort: str, limit: int) -> int:
    base = f"/api/runs/{quote(key, safe=_KEPT)}"
    overview = answers.overview(key)
    found[base] = overview
    found[f"{base}/findings"] = answers.findings(key)
    found[f"{base}/evaluations"] = answers.evaluations(key)
    names = [one["name"] for one in overview["metrics"]]
    run = answers.run(key)
    found[f"{base}/curves"] = {"columns": run.history.columns(names)}
    count = 0
    for kind in KINDS:
        rows, total = _selected(answers, key, kind, query, sort, limit)
        found[f"{base}/episodes?kind={kind}"] = {
            "rows": rows, "total": total, "all": len(rows), "unread": 0, "size": 0, "damaged": 0,
        }  # fmt: skip
        for row in rows:
            place = f"{base}/{kind}/{row['place']}"
            found[place] = answers.episode(key, kind, row["place"])
            found[f"{place}/tokens"] = answers.tokens(key, kind, row["place"])
        for group in {row["group_id"] for row in rows if row["group_id"]}:
            found[f"{base}/group?{urlencode({'kind': kind, 'id': group})}"] = answers.group(key, kind, group)
        count += len(rows)
    return count


def _selected(
    answers: Answers, key: str, kind: str, query: str, sort: str, limit: int
) -> tuple[list[dict[str, Any]], int]:
    """Returns the rows of a kind that the filter lets through; a field that only the other kind has gives none."""
    rows: list[dict[str, Any]] = []
    while True:
        asked = {"kind": kind, "q": query, "sort": sort, "offset": str(len(rows)), "limit": str(limit - len(rows))}
        page = answers.episodes(key, asked)
        rows += page["rows"]
        if not page["rows"] or len(rows) >= min(limit, page["total"]):
            return rows, page["total"]
