"""Shows episodes in a terminal: a list, a conversation, and its tokens.

Guarantees: what is drawn fits any terminal from 20 columns on; no text of a run is obeyed by the terminal. The screen
is a pure state machine of keys, so that it is tested without a terminal. Where the output is no terminal, the list is
printed as lines.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from agentrl.config.errors import UserError
from agentrl.observe.message_view import message_text
from agentrl.observe.shown_text import plain
from agentrl.observe.token_view import LEGEND, TokenRows, read_blocks
from agentrl.view.episode_files import episode_file
from agentrl.view.shown_runs import ShownRun
from agentrl.view.token_ledger import Tokenizers, read_trajectory

KEYS = "j/k move  Enter open  q back  t tokens  / filter  s sort  e eval/train  r run  ? keys"
SORTS = ("-place", "-reward", "reward", "-length", "length")
PLAIN_ROWS = 200  # lines printed where the output is no terminal


@dataclass
class Screen:
    """State of the screen, and the changes that keys make.

    Attributes:
        runs: The shown runs.
        kind: ``train`` or ``eval``.
        query: Filter, see :mod:`agentrl.view.search_query`.
        sort: Field to sort by; with ``-`` the largest first.
        at: Index of the chosen episode in the list.
        top: Index of the first row, or line, on the screen.
        opened: Record of the opened episode; ``None`` for the list.
        tokens: Whether an opened episode is shown as tokens.
        typing: Typed part of a filter; ``None`` if none is.
        said: Message in the last line.
    """

    runs: list[ShownRun]
    kind: str = "train"
    query: str = ""
    sort: str = "-place"
    run: int = 0
    at: int = 0
    top: int = 0
    opened: dict[str, Any] | None = None
    tokens: bool = False
    typing: str | None = None
    said: str = KEYS
    done: bool = False
    _total: int = 0
    _tokenizers: Tokenizers = field(default_factory=Tokenizers)

    def press(self, key: str) -> None:
        """Change the screen as a key says; ``key`` is a letter, or ``up``, ``down``, ``enter``, ``escape``..."""
        if self.typing is not None:
            return self._type(key)
        self.said = KEYS
        if key in ("q", "escape"):
            self.done, self.opened, self.top = self.opened is None, None, 0
        elif key in ("j", "down", "k", "up", "pagedown", "pageup"):
            self._move({"j": 1, "down": 1, "k": -1, "up": -1, "pagedown": 15, "pageup": -15}[key])
        elif key == "/":
            self.opened, self.typing = None, self.query
        elif key == "enter" and self.opened is None:
            self._open()
        elif key in ("n", "p") and self.opened is not None:
            self.opened = None
            self._move(1 if key == "n" else -1)
            self._open()
        elif key == "t":
            self.tokens, self.top = not self.tokens, 0 if self.opened is not None else self.top
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)] if self.sort in SORTS else SORTS[0]
            self._restart()
        elif key == "e":
            self.kind = "eval" if self.kind == "train" else "train"
            self._restart()
        elif key == "r":
            self.run = (self.run + 1) % len(self.runs)
            self._restart()
        return None

    def _restart(self) -> None:
        self.at, self.top, self.opened = 0, 0, None

    def _type(self, key: str) -> None:
        assert self.typing is not None
        if key == "enter":
            self.query, self.typing = self.typing, None
            self._restart()
        elif key == "escape":
            self.typing = None
        elif key == "backspace":
            self.typing = self.typing[:-1]
        elif len(key) == 1:
            self.typing += key

    def _move(self, by: int) -> None:
        if self.opened is not None:
            self.top = max(0, self.top + by)
        else:
            self.at = max(0, min(self._total - 1, self.at + by))

    def _open(self) -> None:
        rows = self._page(self.at, 1).rows
        if rows:
            self.opened = episode_file(self.runs[self.run].folder, self.kind).read(rows[0]["place"])
            self.top = 0

    def _page(self, offset: int, limit: int) -> Any:
        index = self.runs[self.run].index
        descending = self.sort.startswith("-")
        return index.page(
            self.kind, self.query, sort=self.sort.lstrip("-"), descending=descending, offset=offset, limit=limit
        )

    def lines(self, console: Console, height: int) -> list[Text]:
        """Returns the lines of the screen, ``height`` at most, each no wider than the console."""
        width = console.width
        try:
            body = self._list(width, height - 2) if self.opened is None else self._episode(console, height - 2)
        except UserError as error:
            body = [Text(plain(str(error)), style="red")]
        last = f"filter: {self.typing}▏" if self.typing is not None else self.said
        found = [self._head(), *body[: height - 2], Text(plain(last), style="dim")]
        for line in found:
            line.truncate(width, overflow="ellipsis")
        return found

    def _head(self) -> Text:
        run = self.runs[self.run]
        what = f"{self.kind} · {self.query or 'all'} · sorted by {self.sort}"
        return Text(plain(f"{run.key}  {what}"), style="bold")

    def _list(self, width: int, height: int) -> list[Text]:
        height = max(1, height - 1)
        if self.at < self.top:
            self.top = self.at
        if self.at >= self.top + height:
            self.top = self.at - height + 1
        page = self._page(self.top, height)
        self._total = page.total
        self.said = f"{self.at + 1 if page.total else 0} of {page.total}  {KEYS}"
        found = [Text(_columns("reward", "tokens", "turns", "end", "version", "last answer"), style="dim")]
        for number, row in enumerate(page.rows, self.top):
            reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
            answer = (row["error"] if row["failed"] and row["error"] else row["answer"]).replace("\n", " ")
            line = _columns(reward, row["tokens"], row["turns"], row["stop"], row["version"], plain(answer))
            found.append(Text(line, style="reverse" if number == self.at else "red" if row["failed"] else ""))
        return found if page.rows else [*found, Text("no episode")]

    def _episode(self, console: Console, height: int) -> list[Text]:
        assert self.opened is not None
        parts: list[RenderableType] = [Text(plain(_title(self.opened)), style="bold")]
        if self.opened.get("error"):
            parts.append(Text(plain(str(self.opened["error"])), style="red"))
        parts += self._as_tokens() if self.tokens else _as_messages(self.opened)
        lines: list[Text] = []
        for part in parts:
            for segments in console.render_lines(part, console.options.update(height=None), pad=False):
                lines.append(Text.assemble(*((segment.text, segment.style or "") for segment in segments)))
        self.top = max(0, min(self.top, len(lines) - height))
        self.said = f"line {self.top + 1} of {len(lines)}  j/k scroll  n/p next  t tokens  q back"
        return lines[self.top : self.top + height]

    def _as_tokens(self) -> list[RenderableType]:
        assert self.opened is not None
        run = self.runs[self.run]
        pieces, special, said = self._tokenizers.of_run(run.folder, run.config())
        parts: list[RenderableType] = [Text(LEGEND if pieces else f"{LEGEND}\n{said}", style="dim")]
        for role, given in (self.opened.get("trajectories") or {}).items():
            parts.append(Text(plain(role), style="bold"))
            data_of = pieces or (lambda token: str(token).encode())
            parts += [TokenRows(block.tokens) for block in read_blocks(read_trajectory(given), 0, data_of, special)]
        return parts


def _columns(*cells: Any) -> str:
    widths = (8, 7, 6, 12, 8)
    shown = ["-" if cell is None else str(cell) for cell in cells]
    head = " ".join(f"{cell:>{width}.{width}}" for cell, width in zip(shown, widths, strict=False))
    return f"{head}  {shown[-1]}"


def _title(record: dict[str, Any]) -> str:
    reward = "none" if record.get("reward") is None else f"{record['reward']:.3f}"
    metrics = ", ".join(f"{name} {value:.3g}" for name, value in (record.get("metrics") or {}).items())
    parts = [f"task {record.get('task_id')}", f"group {record.get('group_id')}", f"reward {reward}", metrics]
    return "  ".join(part for part in [*parts, str(record.get("stop_reason"))] if part)


def _as_messages(record: dict[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for role, given in (record.get("trajectories") or {}).items():
        if len(record["trajectories"]) > 1:
            parts.append(Text(f"── {plain(role)}", style="bold"))
        parts += [message_text(node.message) for node in read_trajectory(given).nodes]
    return parts


def show(runs: list[ShownRun], kind: str | None, query: str, sort: str) -> None:
    """Show episodes until the user ends it.

    Args:
        runs: The shown runs.
        kind: ``train`` or ``eval``; ``None`` for those of training where the first run has any.
        query: Filter.
        sort: Field to sort by; with ``-`` the largest first.

    Raises:
        UserError: The filter cannot be read.
    """
    console = Console(highlight=False)
    for run in runs:
        run.index.update()
    trained = episode_file(runs[0].folder, "train").size() > 0
    screen = Screen(runs, kind or ("train" if trained else "eval"), query, sort)
    screen._page(0, 1)  # a filter that cannot be read is an error of the command
    if not (console.is_terminal and sys.stdin.isatty()):
        for line in screen._list(10_000, PLAIN_ROWS + 1):
            console.print(Text(line.plain), soft_wrap=True)
        return
    from agentrl.view.keyboard import raw_terminal, read_key

    with raw_terminal(), console.screen(hide_cursor=True):
        while not screen.done:
            console.clear()
            lines = screen.lines(console, console.height)
            console.print(Text("\n").join(lines), end="", soft_wrap=True)
            screen.press(read_key())
