"""Writes an evaluation as one HTML file: tables, plots, and a selection of episodes.

Guarantees: the file asks for nothing from anywhere and runs no script, by its own content policy too; whatever a model
wrote is text; texts of more than :data:`LONGEST` characters are cut, and say so. Light and dark follow the reader's
setting.
"""

import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from agentrl.core.episode import Episode
from agentrl.core.images import shown_text
from agentrl.evaluate.metrics import main_metric
from agentrl.evaluate.moments import Estimate
from agentrl.evaluate.setup import shown_component
from agentrl.evaluate.stored import StoredEpisodes
from agentrl.launch.export_markdown import interval, read_result
from agentrl.launch.results import Evaluation
from agentrl.observe.summary import setup_line, shown_value

LONGEST = 20_000  # characters of a message
FAILURES = 20  # kinds of failures that are shown, the most frequent
EPISODES = 100  # shown: the first half of them wrong or invalid ones, where there are so many
_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1a1a1a, #e6e6e6); --rule: light-dark(#ccc, #444);
  --bar: light-dark(#2a6fb0, #6cb0f0); --paper: light-dark(#fff, #161616); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--paper); }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--rule); padding: .25rem .75rem;
  text-align: right; } td:first-child, th:first-child { text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--rule); padding-left: .75rem; }
svg text { fill: var(--ink); font-size: 12px; } svg .bar { fill: var(--bar); }
svg .line { stroke: var(--ink); fill: none; } svg .curve { stroke: var(--bar); fill: none; stroke-width: 2; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_html(run_dir: Path, target: Path) -> None:
    """Writes the report."""
    evaluation, found = read_result(run_dir)
    setup = evaluation.setup
    title = f"{setup.get('model')} on {shown_component(setup['env'])}"
    with open(target, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>')
        file.write(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
        file.write('<meta name="viewport" content="width=device-width, initial-scale=1">')
        file.write(f"<style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>")
        how = f"{setup.get('data')}; {setup_line(setup)}; {evaluation.n} judged, {evaluation.failed} invalid"
        file.write(f"<p>{_text(how)} ({evaluation.invalid_share:.1%})</p>")
        if found.get("ended"):
            file.write(f"<p>Ended early: {_text(found['ended'])}</p>")
        for note in found.get("notes") or ():
            file.write(f"<p>Note: {_text(note)}.</p>")
        file.write("<h2>Numbers</h2>")
        _table(file, evaluation.estimates, evaluation.invalid_share)
        _plots(file, evaluation)
        for tag, estimates in evaluation.tags.items():
            file.write(f"<h2>{_text(tag)}</h2>")
            _table(file, estimates, None)
        _doubts(file, found)
        _episodes(file, StoredEpisodes(run_dir))
        file.write("</body></html>\n")


def _table(file: TextIO, estimates: Mapping[str, Estimate], share: float | None) -> None:
    bounds = any(not math.isnan(one.if_wrong) for one in estimates.values())
    head = ["", "value", "95% interval", *(["invalid"] if share is not None else [])]
    head += ["all invalid wrong", "all invalid right"] if bounds else []
    file.write(f"<table><tr>{''.join(f'<th>{one}</th>' for one in head)}</tr>")
    for name, one in estimates.items():
        cells = [name, shown_value(name, one.mean), interval(name, one)]
        cells += [f"{share:.1%}"] if share is not None else []
        if bounds:
            cells += ["" if math.isnan(value) else shown_value(name, value) for value in (one.if_wrong, one.if_right)]
        file.write(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
    file.write("</table>")


def _doubts(file: TextIO, found: Mapping[str, Any]) -> None:
    """Writes how many answers say nothing, and why episodes are invalid."""
    answers = found.get("answers") or {}
    rows = [(f"{name} answers", f"{count} of {answers['all']}") for name, count in answers.items() if name != "all"]
    failures = sorted((found.get("failures") or {}).items(), key=lambda one: -one[1])[:FAILURES]
    if any(count for name, count in answers.items() if name != "all") or failures:
        file.write("<h2>What makes the numbers doubtful</h2><table>")
        for name, count in rows:
            file.write(f"<tr><td>{_text(name)}</td><td>{_text(count)}</td></tr>")
        file.write("</table>")
        for text, count in failures:
            file.write(f"<p>{count} invalid:</p><pre>{_text(_cut(text))}</pre>")


def _plots(file: TextIO, evaluation: Evaluation) -> None:
    metric = main_metric(evaluation.estimates)
    if metric is not None:
        rows = [("all", evaluation[metric])]
        rows += [(tag, own[metric]) for tag, own in evaluation.tags.items() if metric in own]
        if all(0 <= one.mean <= 1 for _, one in rows):
            file.write(f"<h2>{_text(metric)}</h2>{bars(rows)}")
    curves = {}
    for beginning in ("pass@", "maj@", "pass^"):
        own = {
            int(name.removeprefix(beginning)): one
            for name, one in evaluation.estimates.items()
            if name.startswith(beginning)
        }
        if len(own) > 1:
            curves[f"{beginning}k"] = own
    if curves:
        file.write(f"<h2>By number of samples</h2>{curve_plot(curves)}")


def bars(rows: Sequence[tuple[str, Estimate]]) -> str:
    """Returns a plot of shares with their intervals, as SVG."""
    left, width, step = 180, 420, 24
    parts = [f'<svg role="img" aria-label="shares with intervals" width="700" height="{step * len(rows) + 8}">']
    for number, (name, one) in enumerate(rows):
        y = step * number + 4
        parts.append(f'<text x="0" y="{y + 13}">{_text(name[:26])}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{width * one.mean:.1f}" height="16"/>')
        if not math.isnan(one.low):
            low, high = left + width * one.low, left + width * one.high
            parts.append(
                f'<path class="line" d="M{low:.1f} {y + 8}H{high:.1f}M{low:.1f} {y + 3}v10M{high:.1f} {y + 3}v10"/>'
            )
        parts.append(f'<text x="{left + width + 12}" y="{y + 13}">{one.mean:.1%}</text>')
    return "".join([*parts, "</svg>"])


def curve_plot(curves: Mapping[str, Mapping[int, Estimate]]) -> str:
    """Returns a plot of shares by number of samples, as SVG."""
    left, top, width, height = 40, 10, 480, 200
    most = max(max(one) for one in curves.values())
    parts = [f'<svg role="img" aria-label="shares by number of samples" width="700" height="{height + 40}">']
    parts.append(f'<path class="line" d="M{left} {top}V{top + height}H{left + width}"/>')
    for share in (0, 0.5, 1):
        parts.append(f'<text x="0" y="{top + height * (1 - share) + 4}">{share:.0%}</text>')
    for number in sorted({1, most}):
        parts.append(f'<text x="{left + width * number / most - 4}" y="{top + height + 18}">{number}</text>')
    for name, own in curves.items():
        points = [(left + width * k / most, top + height * (1 - one.mean)) for k, one in sorted(own.items())]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="curve" d="M{path}"/>')
        parts.append(f'<text x="{points[-1][0] + 8:.1f}" y="{points[-1][1] + 4:.1f}">{_text(name)}</text>')
    return "".join([*parts, "</svg>"])


def _episodes(file: TextIO, episodes: StoredEpisodes) -> None:
    chosen = list(itertools.islice(_chosen(episodes), EPISODES))
    if not chosen:
        return
    file.write(f"<h2>Episodes</h2><p>{len(chosen)} of {len(episodes)}; first those that are wrong or invalid.</p>")
    for episode in chosen:
        reward = "invalid" if episode.failed else f"reward {episode.reward:g}"
        file.write(f"<details><summary>{_text(f'{episode.task_id}, sample {episode.index}: {reward}')}, ")
        file.write(f"{_text(episode.stop_reason)}</summary>")
        if episode.error:
            file.write(f"<pre>{_text(_cut(episode.error))}</pre>")
        for role in episode.trajectories:
            for message in episode.conversation(role):
                text = shown_text(message.get("content"))
                calls = f"\n{message['tool_calls']}" if message.get("tool_calls") else ""
                thought = f"{message['reasoning_content']}\n\n" if message.get("reasoning_content") else ""
                file.write(
                    f"<p><b>{_text(message.get('role'))}</b></p><pre>{_text(_cut(thought + text + calls))}</pre>"
                )
        file.write("</details>")


def _chosen(episodes: StoredEpisodes) -> Iterator[Episode]:
    """Yields wrong and invalid episodes up to half of what is shown, then the others."""
    wrong = 0
    right: list[int] = []
    for place in range(len(episodes)):
        episode = episodes[place]
        if not episode.failed and episode.metrics.get("accuracy", episode.reward) == 1:
            right = [*right, place][:EPISODES]
        elif wrong < EPISODES // 2:
            wrong += 1
            yield episode
        if wrong == EPISODES // 2 and len(right) >= EPISODES // 2:
            break
    for place in right:
        yield episodes[place]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n[{len(text) - LONGEST} more characters]"


def _text(value: object) -> str:
    return html.escape(str(value))
