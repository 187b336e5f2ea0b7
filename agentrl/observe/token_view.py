"""Shows the tokens of a conversation as rows: what was given, what the template added, what was sampled.

Guarantees: every token of the shown messages is in the rows, in its order, with its position in the sequence, its id,
its text and its loss mask, and sampled ones with logprob and version; all of it can be read without colour. Pure: rows
follow from the trajectory alone.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from agentrl.core.episode import Message, Node, Trajectory
from agentrl.core.images import shown_text, text_of
from agentrl.observe.message_view import call_lines, error_lines
from agentrl.observe.shown_text import quoted

LEGEND = "index, origin, loss mask │ tokens, below them their ids (* special) and, where sampled, their logprobs"
_LABEL = 22  # columns before the tokens
_LEAST = 8  # columns for tokens in a very narrow terminal


class Origin(StrEnum):
    """Source of a token: given, put in by the template, or sampled."""

    GIVEN = "given"  # text of a message
    TEMPLATE = "template"  # what the chat template put around it, or encoded tools and calls
    SAMPLED = "sampled"  # the model


COLORS = {Origin.GIVEN: "cyan", Origin.TEMPLATE: "bright_black", Origin.SAMPLED: "green"}
SPECIAL = "magenta"


@dataclass(frozen=True)
class Token:
    """A token of a conversation.

    Attributes:
        index: Position in the sequence that starts at the conversation's first token.
        id: Token id.
        data: Bytes that it stands for.
        origin: Source of the token.
        special: Whether it is one of the tokenizer's special tokens.
        mask: Loss mask: 1 if the policy sampled it.
        logprob: Behavior logprob; 0.0 if it was not sampled.
        version: Policy version that sampled it.
    """

    index: int
    id: int
    data: bytes
    origin: Origin
    special: bool
    mask: int
    logprob: float
    version: int

    @property
    def lines(self) -> tuple[str, ...]:
        """Text, id and logprob, one below the other."""
        head = (quoted(self.data), f"{self.id}{'*' * self.special}")
        return (*head, f"{self.logprob:.2f}") if self.origin is Origin.SAMPLED else head

    @property
    def label(self) -> str:
        """Origin, version and loss mask, which neighbours in a row share."""
        version = f" v{self.version}" if self.origin is Origin.SAMPLED else ""
        return f"{self.origin.value + version:<11} {self.mask}"


@dataclass(frozen=True)
class Block:
    """Tokens that were added to a conversation at once: a prompt with all its messages, or an answer.

    Attributes:
        node: Index of the node that holds them; of a prompt, its last message.
        tokens: Tokens in order.
    """

    node: int
    tokens: list[Token]


def read_blocks(
    trajectory: Trajectory, first: int, data_of: Callable[[int], bytes], special_ids: Collection[int]
) -> list[Block]:
    """Reads the tokens of the nodes from ``first`` on.

    Args:
        trajectory: A recorded conversation.
        first: Index of the first node to read.
        data_of: Function from an id to the bytes that it stands for.
        special_ids: Ids of the special tokens.
    """
    found: list[Block] = []
    given: list[Message] = []  # messages that were rendered together, whose tokens stand at the last of them
    for index in range(first, len(trajectory.nodes)):
        node = trajectory.nodes[index]
        given.append(node.message)
        if not node.token_ids:
            continue
        start = sum(len(trajectory.nodes[one].token_ids) for one in trajectory.path(index)[:-1])
        pieces = [data_of(token) for token in node.token_ids]
        origins = _origins(node, pieces, given)
        columns = zip(node.token_ids, pieces, origins, node.loss_mask, node.logprobs, node.versions, strict=True)
        tokens = [
            Token(start + at, token, data, origin, token in special_ids, mask, logprob, version)
            for at, (token, data, origin, mask, logprob, version) in enumerate(columns)
        ]
        found.append(Block(index, tokens))
        given = []
    return found


def _origins(node: Node, pieces: Sequence[bytes], given: Sequence[Message]) -> list[Origin]:
    """Tells the text of messages from what the template put around it."""
    if node.finish_reason is not None:
        return [Origin.SAMPLED if mask else Origin.TEMPLATE for mask in node.loss_mask]
    whole, spans, position = b"".join(pieces), [], 0
    for message in given:
        content = text_of(message.get("content")).encode("utf-8", "surrogatepass")
        for text in (content, content.strip()):  # many templates strip it
            at = whole.find(text, position) if text else -1
            if at >= 0:
                position = at + len(text)
                spans.append((at, position))
                break
    found: list[Origin] = []
    start = 0
    for piece in pieces:
        middle = start + len(piece) / 2
        inside = any(low <= middle <= high for low, high in spans) and bool(piece)
        found.append(Origin.GIVEN if inside else Origin.TEMPLATE)
        start += len(piece)
    return found


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens for a terminal of any width, as a renderable of ``rich``.

    Attributes:
        tokens: Tokens in order.
    """

    tokens: Sequence[Token]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields three lines a row: texts, ids and, where sampled, logprobs."""
        for row in rows(self.tokens, max(options.max_width - _LABEL, _LEAST)):
            yield from _row_lines(row)


def rows(tokens: Sequence[Token], width: int) -> Iterator[list[Token]]:
    """Splits tokens into rows: of one origin, version and mask each, and at most ``width`` columns."""
    for _, run in groupby(tokens, key=lambda token: token.label):
        row: list[Token] = []
        used = 0
        for token in run:
            columns = _columns(token) + 1
            if row and used + columns > width:
                yield row
                row, used = [], 0
            row.append(token)
            used += columns
        yield row


def _columns(token: Token) -> int:
    return max(cell_len(line) for line in token.lines)


def _row_lines(row: Sequence[Token]) -> Iterator[Text]:
    names = (f"{row[0].index:>5} {row[0].label}", "id", "logprob")
    for number in range(len(row[0].lines)):
        style = "" if number == 0 else "dim"
        label = names[number] if number == 0 else f"{'':>6}{names[number]}"
        line = Text(overflow="fold")
        line.append(f"{label:<{_LABEL - 2}}│", style="dim")
        for token in row:
            text = token.lines[number]
            color = SPECIAL if token.special else COLORS[token.origin]
            line.append(text + " " * (_columns(token) - cell_len(text)), style=f"{style} {color}".strip())
            line.append("│", style="dim")
        yield line


def answer_view(node: Node, parser: str, template: str) -> Text:
    """Shows what was read from a sampled answer.

    Args:
        node: The answer.
        parser: Name of the parser that read it.
        template: Name of the chat template.
    """
    message = node.message
    shown = Text()
    shown.append("parsed: ", style="bold")
    cut = node.finish_reason == "length"
    finish = f"finish {node.finish_reason}{', cut at its length limit' * cut}"
    shown.append(f"{finish}; parser {parser}; template {template}", style="yellow" if cut else "")
    parts = [("reasoning", message["reasoning_content"], "dim")] if message.get("reasoning_content") else []
    parts.append(("content", shown_text(message.get("content")), ""))
    parts += [("call", line, "") for line in call_lines(message)]
    parts += [("error", line, "red") for line in error_lines(message)]
    for name, text, style in parts:
        shown.append(f"\n  {name:<10}", style="bold")
        shown.append(repr(text) if name in ("reasoning", "content") else quoted_line(text), style=style)
    return shown


def quoted_line(text: str) -> str:
    """Returns a text as one line, with line breaks and unprintable characters escaped as in ``repr``."""
    return repr(text)[1:-1]
