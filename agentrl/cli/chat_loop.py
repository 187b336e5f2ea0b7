"""The terminal side of ``agentrl chat``: reads lines, runs turns and shows them.

Guarantees: lines come from a terminal or from a pipe, and one that cannot be read as UTF-8 ends nothing; what a model
says is shown and never obeyed by the terminal; a turn that fails is reported, and the conversation can go on.
"""

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.cli.conversation import Conversation, Step
from agentrl.core.agent import ContextOverflow, InferenceError
from agentrl.core.episode import Message, Node
from agentrl.core.message_shape import MessageError
from agentrl.inference.session import ChatSession
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.inference.tool_parsers import PARSERS
from agentrl.observe.message_view import message_text
from agentrl.observe.shown_text import plain
from agentrl.observe.token_view import LEGEND, Block, TokenRows, answer_view, read_blocks

ASK = "you: "
HELP = (
    "/quit (or Ctrl-D) ends. /reset begins a new conversation. /system TEXT begins one with this system message.",
    "/tokens shows the tokens of the conversation so far. //TEXT says /TEXT. << begins several lines, which a line "
    "with a single dot ends.",
)
WITH_ENV = "Enter lets the model act, and the environment after it; a text is said to the model before it acts."
TURN_ERRORS = (InferenceError, TemplateError, MessageError)  # a person can act on them, and go on
Read = Callable[[], str]


@dataclass(frozen=True)
class TokenLook:
    """How tokens are read and shown.

    Attributes:
        template: The chat template.
        template_name: Name of the template, for a person.
        parser: Name of the parser of tool calls.
    """

    template: ChatTemplate
    template_name: str
    parser: str


def line_reader(console: Console) -> Read:
    """Returns the function that reads a line from standard input; at the end of input it raises ``EOFError``."""
    stdin = sys.stdin or io.StringIO()
    if isinstance(stdin, io.TextIOWrapper):
        stdin.reconfigure(errors="replace")
    if stdin.isatty() and console.is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and editing
        return partial(input, ASK)

    def read() -> str:
        line = stdin.readline()
        if not line:
            raise EOFError
        line = line.rstrip("\n")
        console.print(Text(ASK + plain(line), style="bold"), soft_wrap=True)
        return line

    return read


class ChatLoop:
    """Reads lines and shows turns until the person ends it.

    Args:
        conversation: The conversation.
        runner: Event loop that runs the turns; between them Ctrl-C interrupts the reading.
        console: Console to print to.
        read: Function that returns the next line.
        look: How tokens are read; ``None`` where the server returns none.
        tokens: Whether each turn's tokens are shown.

    Attributes:
        on_error: Called after a failed turn; raises if the chat cannot go on.
        before_retry: Called before a turn that follows a failed one.
    """

    def __init__(
        self,
        conversation: Conversation,
        runner: asyncio.Runner,
        console: Console,
        read: Read,
        *,
        look: TokenLook | None = None,
        tokens: bool = False,
    ) -> None:
        self._conversation, self._runner, self._out, self._read = conversation, runner, console, read
        self._look, self._tokens = look, tokens
        self.on_error: Callable[[], None] = _nothing
        self.before_retry: Callable[[], None] = _nothing
        self._failures = 0
        self._failed = False  # the latest turn

    def run(self) -> int:
        """Talks until ``/quit`` or the end of input; returns the exit code, 1 if a turn failed."""
        for line in (*HELP, *([WITH_ENV] if self._conversation.env is not None else [])):
            self._out.print(Text(line, style="dim"))
        if self._tokens:
            self._out.print(Text(f"tokens: {LEGEND}", style="dim"))
        self._begin()
        with contextlib.suppress(EOFError):
            while self._obey(self._next_line()):
                pass
        return int(self._failures > 0)

    def _next_line(self) -> str:
        line = self._read()
        if line.strip() != "<<":
            return line
        lines: list[str] = []
        while (line := self._read()) != ".":
            lines.append(line)
        return "\n".join(lines)

    def _obey(self, line: str) -> bool:
        """Runs a command or a turn; returns whether the chat goes on."""
        if not line.startswith("/") or line.startswith("//"):
            self._turn(line.removeprefix("/") if line.startswith("//") else line)
            return True
        command, _, rest = line.strip().partition(" ")
        if command == "/reset":
            self._begin()
        elif command == "/system" and rest.strip():
            self._conversation.system = rest.strip()
            self._begin()
        elif command == "/system":
            self._say("/system TEXT: a text is missing")
        elif command == "/tokens":
            self._show_all()
        elif command == "/help":
            self._say("\n".join(HELP))
        elif command != "/quit":
            self._say(f"no command {command}; /help lists them, and //{line[1:]} says it to the model")
        return command != "/quit"

    def _begin(self) -> None:
        messages = self._runner.run(self._conversation.begin())
        if self._conversation.tools:
            self._say(f"tools: {', '.join(map(_signature, self._conversation.tools))}")
        for message in messages:
            self._show(message)

    def _turn(self, text: str) -> None:
        conversation = self._conversation
        if conversation.over:
            if text.strip():
                self._say("the episode is over: Enter begins the next one")
            else:
                self._begin()
            return
        if not text.strip() and not conversation.can_answer:
            self._say("type a message; /help lists the commands")
            return
        if self._failed:
            self.before_retry()
        env = conversation.env
        try:
            with self._waiting("sampling"):
                first = self._runner.run(conversation.answer(text if text.strip() else ""))
        except TURN_ERRORS as error:
            if isinstance(error, ContextOverflow) and env is not None and conversation.session.last_sampled is not None:
                self._say(str(error))
                self._show_step(self._runner.run(conversation.judge(env)))
            else:
                self._report(error)
            return
        self._failed = False
        self._show_nodes(first)
        if env is not None:
            with self._waiting("the environment acts"):
                step = self._runner.run(conversation.observe(env))
            self._show_step(step)

    def _report(self, error: Exception) -> None:
        """Says why there is no answer, and what can be done."""
        self._failed, self._failures = True, self._failures + 1
        self.on_error()
        final = isinstance(error, ContextOverflow | TemplateError | MessageError)
        again = "/reset begins a new conversation" if final else "Enter tries again, /reset begins anew"
        self._out.print(Text(f"no answer: {plain(str(error))} ({again})", style="red"), soft_wrap=True)

    def _waiting(self, what: str) -> contextlib.AbstractContextManager[object]:
        return self._out.status(what) if self._out.is_terminal else contextlib.nullcontext()

    def _show_nodes(self, first: int) -> None:
        if self._tokens:
            self._show_tokens(first)
        else:
            self._show_answers(self._conversation.trajectory.nodes[first:])

    def _show_step(self, step: Step) -> None:
        reward = "missing" if step.reward is None else f"{step.reward:g}"
        numbers = "".join(f"  {plain(name)} {value:g}" for name, value in step.metrics.items())
        self._out.print(Text(f"reward {reward}{numbers}", style="bold"))
        for message in step.observation:
            self._show(message)
        if step.end is not None:
            total = self._conversation.total
            end = "missing" if total is None else f"{total:g}"
            self._out.print(Text(f"{step.end}; reward of the episode: {end}. Enter begins the next one.", style="bold"))

    def _show_answers(self, nodes: Sequence[Node]) -> None:
        """Shows the sampled messages, and what the agent itself answered between them."""
        answered = False
        for node in nodes:
            if node.finish_reason is None and not answered:
                continue  # shown when it came, or typed by the person
            answered = True
            self._show(node.message)
            if node.finish_reason == "length":
                self._say("(cut at its length limit)")

    def _show_tokens(self, first: int) -> None:
        look = self._look
        assert look is not None
        trajectory = self._conversation.trajectory
        data_of = look.template.token_bytes
        parser = look.parser if self._conversation.offered.tools else "none (no tools offered)"
        for block in read_blocks(trajectory, first, data_of, look.template.special_ids):
            self._out.print(Text(_title(block), style="bold"))
            self._out.print(TokenRows(block.tokens))
            node = trajectory.nodes[block.node]
            if node.finish_reason is not None:
                self._out.print(answer_view(node, parser, look.template_name), soft_wrap=True)
                tools = self._conversation.offered.tools
                if count := calls_in_thought(node.message, look.parser, tools) if tools else 0:
                    self._say(f"  nothing follows the thought, and {count} tool calls in it are not made")
        self._show_drift()

    def _show_drift(self) -> None:
        """Says whether the template would render the conversation to other ids than those that are stored."""
        session = self._conversation.session
        if not isinstance(session, ChatSession):
            return
        try:
            drift = session.drift()
        except TemplateError as error:
            self._say(f"drift: not measured, the template does not render this conversation: {error}")
            return
        if drift is not None and (drift.special or drift.text):
            same = "the answer's special tokens are left out" if drift.left_out else "the same text in other tokens"
            what = "special tokens differ" if drift.special else same
            style = "red" if drift.special else "dim"
            line = f"drift: the template would render {drift.text:.0%} of these ids differently ({what})"
            self._out.print(Text(line, style=style))

    def _show_all(self) -> None:
        if self._look is None:
            self._say("this server returns no token ids")
        elif not self._conversation.trajectory.nodes:
            self._say("nothing was sampled yet")
        else:
            self._show_tokens(0)

    def _show(self, message: Message) -> None:
        self._out.print(message_text(message), soft_wrap=not self._out.is_terminal)

    def _say(self, text: str) -> None:
        self._out.print(Text(text, style="dim"))


def _nothing() -> None:
    """Does nothing."""


def _signature(tool: Mapping[str, Any]) -> str:
    """Describes a tool's schema as ``name(arguments)``."""
    function = tool.get("function") or {}
    properties = (function.get("parameters") or {}).get("properties") or {}
    return plain(f"{function.get('name')}({', '.join(properties)})")


def _title(block: Block) -> str:
    """Describes a block of tokens: a prompt or an answer, and its number of tokens."""
    sampled = [token.logprob for token in block.tokens if token.mask]
    if not sampled:
        return f"prompt, {len(block.tokens)} tokens"
    return f"answer, {len(block.tokens)} tokens, mean logprob {sum(sampled) / len(sampled):.2f}"


def calls_in_thought(message: Message, parser: str, tools: Sequence[dict[str, Any]]) -> int:
    """Counts the tool calls in the thought of an answer that has nothing else: a model that forgot to close it.

    Args:
        message: The answer.
        parser: Name of the parser.
        tools: Tools of the conversation.
    """
    thought = message.get("reasoning_content")
    if not thought or message.get("content") or message.get("tool_calls"):
        return 0
    return len(PARSERS[parser].parse(str(thought), tools).calls)
