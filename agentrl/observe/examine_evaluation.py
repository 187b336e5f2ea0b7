"""Examines the folder of an evaluation for what makes its number doubtful, for ``agentrl doctor``.

Guarantees: files are only read; each finding names the figure that it is about.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.observe.finding import Finding

RESULT, SETUP = "result.json", "setup.json"
MANY = 0.05  # share of answers that say nothing from which a score is doubtful
WIDE = 0.1  # half width of an interval that tells little
_ANSWERS = {
    "cut": ("They ended at their length limit.", "Raise sampling.max_new_tokens, or inference.options of an API."),
    "empty": (
        "They hold neither text nor a call: a reasoning model may have used up its tokens.",
        "Look at some with `agentrl view`; raise sampling.max_new_tokens.",
    ),
    "refused": ("The model refuses to answer.", "Look at some with `agentrl view`; they count as wrong."),
    "filtered": ("A content filter of the API took them.", "They count as wrong; ask the API's owner."),
}


def is_evaluation(run_dir: Path) -> bool:
    """Whether a folder is that of an evaluation, finished or not."""
    return (run_dir / RESULT).is_file() or (run_dir / SETUP).is_file()


def examine_evaluation(run_dir: Path) -> tuple[list[Finding], list[str]]:
    """Returns the findings about an evaluation, and one sentence for each check that could not be made."""
    if not (run_dir / RESULT).is_file():
        return [], [f"{run_dir} has no {RESULT}: the evaluation goes on, or was cut; the same command goes on with it"]
    try:
        found = json.loads((run_dir / RESULT).read_bytes())
    except ValueError as error:
        return [], [f"{run_dir / RESULT} is damaged: {error}"]
    return list(_findings(found, run_dir)), []


def _findings(found: Mapping[str, Any], run_dir: Path) -> Iterator[Finding]:
    judged, invalid = found.get("eval/n", 0), found.get("eval/invalid", 0)
    if invalid:
        reasons = sorted((found.get("failures") or {}).items(), key=lambda one: -one[1])
        why = f"The most frequent reason is {_last_line(reasons[0][0])} ({reasons[0][1]} times)." if reasons else ""
        yield Finding(
            "invalid",
            f"{invalid:.0f} of {judged + invalid:.0f} episodes are invalid: they count in no mean",
            why or "No reason was kept.",
            f"Mend that, then the same command with --output {run_dir} --resume tries them again.",
        )
    answers = found.get("answers") or {}
    for kind, (cause, remedy) in _ANSWERS.items():
        count, total = answers.get(kind, 0), answers.get("all", 0)
        if total and count / total >= MANY:
            yield Finding(kind, f"{count} of {total} answers are {kind}", cause, remedy)
    low, high = found.get("eval/accuracy_low"), found.get("eval/accuracy_high")
    if low is not None and high is not None and (high - low) / 2 > WIDE:
        width = f"{100 * (high - low) / 2:.0f} points"
        yield Finding(
            "wide",
            f"the accuracy is known within {width}",
            "There are few tasks.",
            "More tasks (--n), or --until-ci with the half width that is wanted.",
            "note",
        )
    if found.get("ended"):
        yield Finding(
            "ended", f"it ended early: {found['ended']}", "A rule of eval.* ended it.", "None needed.", "note"
        )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f"{lines[-1]:.200}" if lines else "unknown"
