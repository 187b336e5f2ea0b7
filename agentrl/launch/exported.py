"""Writes an evaluation in a form that others read: Markdown, HTML, ``datasets``, Inspect AI, a line for a leaderboard.

Guarantees: an evaluation's own files are only read; texts of models stay texts, whatever they hold; a form that needs a
package says which before it writes.
"""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from agentrl.config.errors import ConfigError
from agentrl.core.registry import nearest
from agentrl.evaluate.judged import RESULT
from agentrl.launch.export_datasets import write_datasets
from agentrl.launch.export_html import write_html
from agentrl.launch.export_inspect import is_listed, write_inspect
from agentrl.launch.export_markdown import leaderboard_line, write_markdown

FORMS: dict[str, tuple[str, Callable[[Path, Path], Path | None]]] = {
    "markdown": ("report.md", write_markdown),
    "html": ("report.html", write_html),
    "datasets": ("dataset", write_datasets),
    "inspect": ("inspect", write_inspect),
}
LEADERBOARD = "leaderboard"


def export(run_dir: Path, to: str, output: Path | None, console: Console) -> Path | None:
    """Writes an evaluation in another form.

    Args:
        run_dir: Folder of the evaluation.
        to: Form: ``markdown``, ``html``, ``datasets``, ``inspect``, or ``leaderboard``, a line that is printed.
        output: File or folder to write; by default one in the evaluation's folder.
        console: Console to print to.

    Returns:
        What was written; ``None`` for a line that was printed.

    Raises:
        ConfigError: The form is unknown, or the folder holds no finished evaluation.
    """
    known = [*FORMS, LEADERBOARD]
    if to not in known:
        raise ConfigError(f"--to {to}: unknown{nearest(to, known)}; known: {', '.join(known)}")
    if not (run_dir / RESULT).is_file():
        raise ConfigError(f"{run_dir} holds no finished evaluation ({RESULT})")
    if to == LEADERBOARD:
        console.print(leaderboard_line(run_dir), highlight=False, markup=False, soft_wrap=True)
        return None
    name, write = FORMS[to]
    target = output or run_dir / name
    target = write(run_dir, target) or target
    console.print(f"written {target}", highlight=False, markup=False, soft_wrap=True)
    if to == "inspect":
        seen = f"inspect view --log-dir {target.parent}"
        hidden = f"{seen} does not list it: want a folder as --output, or a name that begins with the time"
        console.print(seen if is_listed(target) else hidden, highlight=False, markup=False, soft_wrap=True)
    return target
