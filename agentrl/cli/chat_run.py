"""Runs ``agentrl chat``: the model's server, the connection to it, and their end.

Guarantees: what cannot work is refused before a process starts; however a chat ends (``/quit``, end of input, Ctrl-C,
SIGTERM, a dead server), the environment is closed, and no process and no file is left.
"""

import asyncio
import io
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.cli.chat_loop import ChatLoop, Read, TokenLook, line_reader
from agentrl.cli.conversation import Conversation
from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import NO_ENV
from agentrl.core.registry import require
from agentrl.core.task_source import NoTasksError
from agentrl.inference.backend import Backend
from agentrl.inference.client import ChatClient, Client
from agentrl.inference.kinds.kind import kinds_that, server_kind
from agentrl.inference.router import Router
from agentrl.inference.template import TemplateError
from agentrl.inference.tool_parsers import PARSERS, parser_for
from agentrl.launch.needed_packages import SERVING, TOKENIZING, require_packages
from agentrl.launch.resolve import resolve
from agentrl.launch.run_checks import check_names
from agentrl.launch.servers import find_model, server_python, start_servers
from agentrl.launch.supervisor import ChildFailed, Supervisor
from agentrl.observe.shown_text import plain
from agentrl.rollout.assemble import make_client, make_text_client

STOPPED = 130  # the shell's code for a process ended by Ctrl-C
CONTEXT = 4096  # tokens of a conversation where neither a recipe nor a setting says it
PATIENCE = 2.0  # seconds that a person waits for a server that is gone


def run_chat(recipe: Recipe, *, tokens: bool, console: Console | None = None, read: Read | None = None) -> int:
    """Starts the model's server unless the recipe names a running one, and talks until the person ends it.

    Args:
        recipe: The recipe; without an environment where ``env.id`` is ``none``.
        tokens: Whether each turn's tokens are shown.
        console: Console to print to.
        read: Function that returns the next line; standard input by default.

    Returns:
        Exit code: 0, 1 if a turn failed or the server died, 130 after Ctrl-C or SIGTERM.

    Raises:
        UserError: The chat cannot start.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    out = console or Console(highlight=False)
    in_text = check(recipe, tokens=tokens)
    if not in_text:
        require_packages(dict.fromkeys(TOKENIZING if recipe.inference.urls else SERVING, "agentrl chat"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without it
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-chat-") as folder:
            supervisor = Supervisor(Path(folder))
            try:
                recipe, model, urls = _serve(recipe, in_text, supervisor, Path(folder), out)
                return _converse(recipe, model, urls, tokens, supervisor, out, read or line_reader(out))
            finally:
                supervisor.stop()
    except KeyboardInterrupt:
        out.print("\nstopped")
        return STOPPED
    except ChildFailed as error:
        out.print(Text(plain(str(error)), style="red"), soft_wrap=True)
        return 1


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Has the same effect as Ctrl-C, inside an event loop too."""
    signal.raise_signal(signal.SIGINT)


def check(recipe: Recipe, *, tokens: bool) -> bool:
    """Refuses what cannot work; returns whether the server is used through text.

    Raises:
        UserError: A component or a capability is missing.
    """
    check_names(recipe)
    try:
        require("agent", recipe.agent.id)
    except LookupError as error:
        raise UserError(str(error)) from error
    engine = recipe.inference.engine
    in_text = not server_kind(engine).capabilities.token_logprobs
    if in_text and tokens:
        raise UserError(
            f"--tokens needs token ids, which inference.engine={engine} does not return; use --engine "
            f"{', '.join(kinds_that('token_logprobs'))}"
        )
    if recipe.env.id != NO_ENV and recipe.workflow.id != "agent_env":
        raise UserError(f"workflow.id={recipe.workflow.id}: a chat runs agent_env alone; --env none talks without it")
    if not recipe.inference.urls:
        server_python(recipe.inference)
    return in_text


def _serve(
    recipe: Recipe, in_text: bool, supervisor: Supervisor, folder: Path, out: Console
) -> tuple[Recipe, Path | None, list[str]]:
    """Finds the model and starts its server, where they are needed.

    Returns:
        The resolved recipe, the model's folder (``None`` if the servers are used through text), and their URLs.
    """
    urls, model = list(recipe.inference.urls), None
    if not (in_text and urls):
        model = find_model(recipe, out).path
    recipe = resolve(_for_a_person(recipe, model), None)
    if model is not None and not urls:
        out.print(Text("server  starting; this takes some seconds", style="dim"))
        urls = start_servers(recipe, model, folder, supervisor)
    return recipe, None if in_text else model, urls


def _for_a_person(recipe: Recipe, model: Path | None) -> Recipe:
    """Sets what suits a chat where neither the recipe nor a setting does: a long context, and short waits."""
    given = recipe.inference.model_fields_set
    changes: dict[str, Any] = {} if "patience" in given else {"patience": PATIENCE}
    if "context_length" not in given and model is not None:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        known = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
        changes["context_length"] = min(CONTEXT, known or CONTEXT)
    sampling = recipe.sampling.model_copy(update={"eval_temperature": recipe.sampling.temperature})  # of APIs in text
    return recipe.model_copy(update={"inference": recipe.inference.model_copy(update=changes), "sampling": sampling})


def _converse(
    recipe: Recipe, model: Path | None, urls: list[str], tokens: bool, supervisor: Supervisor, out: Console, read: Read
) -> int:
    """Connects to the servers and runs the chat; the environment and the connections are closed at its end."""
    with asyncio.Runner() as runner, ExitStack() as ends:
        look: TokenLook | None = None
        if model is None:
            client: Client = make_text_client(recipe, urls[0])
        else:
            client = _token_client(recipe, model, urls)
            ends.callback(lambda: runner.run(client.router.close()))
            runner.run(_must_answer(client.router.backends, recipe))
            look = token_look(recipe, client)
        conversation = _conversation(recipe, client)
        ends.callback(lambda: runner.run(conversation.close()))
        for line in opening(recipe, look):
            out.print(Text(line), soft_wrap=True)
        loop = ChatLoop(conversation, runner, out, read, look=look, tokens=tokens)
        loop.on_error = supervisor.check
        if isinstance(client, ChatClient):
            loop.before_retry = partial(_take_back, client.router, client.router.backends)
        try:
            return loop.run()
        except NoTasksError as error:
            raise UserError(str(error)) from error


def _token_client(recipe: Recipe, model: Path, urls: list[str]) -> ChatClient:
    try:
        return make_client(recipe, model, urls)
    except TemplateError as error:
        raise UserError(str(error)) from error


async def _must_answer(backends: Sequence[Backend], recipe: Recipe) -> None:
    for backend in backends:
        if not await backend.alive():
            others = ", ".join(kinds_that("token_logprobs"))
            raise UserError(
                f"no server of the kind inference.engine={recipe.inference.engine} answers at {backend.url}; if it is "
                f"of another kind, say which: --engine {others}, or openai for an API in text"
            )


def _take_back(router: Router, backends: Sequence[Backend]) -> None:
    """Tries servers again that did not answer."""
    for backend in backends:
        router.admit(backend)


def _conversation(recipe: Recipe, client: Client) -> Conversation:
    try:
        return Conversation(recipe, client)
    except (LookupError, ImportError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(str(error.args[0] if error.args else error)) from error


def token_look(recipe: Recipe, client: ChatClient) -> TokenLook:
    """Returns how the tokens of this recipe's conversations are read and named."""
    source = recipe.model.chat_template
    names = {None: "the model's own", "training": "training (TRL's variant of the model's own)"}
    parser = recipe.inference.tool_parser or parser_for(client.template.source).name
    return TokenLook(client.template, names.get(source, str(source)), parser)


def opening(recipe: Recipe, look: TokenLook | None) -> list[str]:
    """Returns the lines that are shown once, before the first prompt: how prompts are made and answers sampled."""
    sampling = recipe.sampling
    how = "greedy (temperature 0)" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    how += f", top_p {sampling.top_p:g}" * (sampling.top_p < 1) + f", top_k {sampling.top_k}" * (sampling.top_k > 0)
    lines = [f"sample  {how}, up to {sampling.max_new_tokens} tokens an answer"]
    if look is not None:
        lines[0] += f", {recipe.inference.context_length} tokens a conversation"
        lines.insert(0, f"prompt  template: {look.template_name}; tool calls are read by the parser {look.parser}")
        own = parser_for(look.template.source)
        parser = own if own.name == look.parser else PARSERS[look.parser]
        found = [*look.template.findings(parser), *look.template.notes]
        lines += [f"check   {line}" for line in found]
    return lines
