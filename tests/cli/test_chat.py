"""``agentrl chat``: what a person sees, and what is left when it ends."""

import asyncio
import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from agentrl import Agent, LanguageEnvironment, Message
from agentrl.cli.chat import chat_recipe
from agentrl.cli.chat_loop import ChatLoop, TokenLook
from agentrl.cli.chat_run import run_chat
from agentrl.cli.conversation import Conversation
from agentrl.cli.main import main
from agentrl.config.errors import ConfigError
from agentrl.config.supervised import NO_ENV
from agentrl.inference.backend import Generation, InferenceError, SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.inference.tool_parsers import parser_for
from tests.end_to_end import command, environment
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_template import REWRITING
from tests.served import served

THIS = Path(__file__)
SECONDS = 120


class Countdown(LanguageEnvironment):
    """Three steps of reward 0.5 each; knows whether it was closed."""

    dataset: ClassVar = [{"question": "count"}]
    closed: ClassVar[list[str]] = []

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        self.left = 2
        if self.choose_task(seed, options)["question"] != "count":
            raise AssertionError
        return [{"role": "user", "content": f"count, seed {seed}"}], {"metrics": {"left": 2.0}}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self.left -= 1
        over = self.left == 0
        return [{"role": "user", "content": f"{self.left} left"}], 0.5, over, False, {"metrics": {"left": self.left}}

    async def close(self) -> None:
        self.closed.append("closed")


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


Script = Callable[[list[int], SamplingParams], Generation]


def talk(
    template: ChatTemplate,
    script: Script,
    lines: Sequence[str],
    *settings: str,
    env: str | None = None,
    tokens: bool = False,
    context: int = 500,
) -> tuple[int, str, FakeBackend]:
    """Runs a chat with a scripted server and scripted lines; returns the exit code and all that was printed."""
    backend = FakeBackend(script)
    sessions = SessionSettings(SamplingParams(20, seed=0), context, locked=False, model="m")
    client = ChatClient(Router([backend], patience=0.01), template, sessions, sessions)
    out, given = io.StringIO(), iter(lines)

    def read() -> str:
        line = next(given, None)
        if line is None:
            raise EOFError
        return line

    with asyncio.Runner() as runner:
        conversation = Conversation(chat_recipe("tiny", list(settings), env=env), client)
        look = TokenLook(template, "ChatML", parser_for(template.source).name)
        console = Console(file=out, width=150, force_terminal=False, highlight=False)
        loop = ChatLoop(conversation, runner, console, read, look=look, tokens=tokens)
        loop.before_retry = lambda: client.router.admit(backend)
        code = loop.run()
    return code, out.getvalue(), backend


def says(template: ChatTemplate, *texts: str) -> Script:
    left = iter(texts)
    return lambda ids, params: answer([*template.encode(next(left)), template.eos_id])


def sent(template: ChatTemplate, backend: FakeBackend) -> list[str]:
    return [template.tokenizer.decode(ids) for ids, _ in backend.requests]


def test_a_conversation_goes_on_as_the_trainer_would_see_it(template: ChatTemplate) -> None:
    code, text, backend = talk(template, says(template, "hello", "[bold]5[/bold] :smile:"), ["hi", "2 + 3?"])
    assert code == 0
    assert "assistant: hello\n" in text and "assistant: [bold]5[/bold] :smile:\n" in text
    assert sent(template, backend)[1] == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )


class PlanningAgent(Agent):
    """Speaks as a planner first."""

    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        said: Any = {}
        for llm in (self.llm.session("planner"), self.llm.session()):  # type: ignore[attr-defined]
            reply = await llm.chat.completions.create(messages=observation)
            said = reply.choices[0].message.model_dump(exclude_none=True)
        self.llm.reward(0.5, message=said)  # type: ignore[attr-defined]
        return said


def test_an_agent_in_several_roles_shows_what_the_assistant_says(template: ChatTemplate) -> None:
    settings = [f"agent.id={THIS}:PlanningAgent"]
    code, text, backend = talk(template, says(template, "a plan", "an answer"), ["hi"], *settings)
    assert code == 0 and len(backend.requests) == 2
    assert "assistant: an answer\n" in text and "a plan" not in text


def test_commands_begin_a_new_conversation(template: ChatTemplate) -> None:
    lines = ["hi", "/reset", "again", "/system be brief", "now", "/system", "/nonsense 1", "//slash", "/quit", "never"]
    code, text, backend = talk(template, says(template, "1", "2", "3", "4"), lines)
    assert code == 0 and len(backend.requests) == 4
    one, two, three, four = sent(template, backend)
    assert (one, two) == tuple(f"<|im_start|>user\n{x}<|im_end|>\n<|im_start|>assistant\n" for x in ("hi", "again"))
    assert three.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nnow<|im_end|>")
    assert four.endswith("3<|im_end|>\n<|im_start|>user\n/slash<|im_end|>\n<|im_start|>assistant\n")
    assert "no command /nonsense" in text and "/system TEXT: a text is missing" in text
    assert backend.requests[0][1].seed != backend.requests[1][1].seed, "each conversation has its own seed"


def test_several_lines_are_one_message(template: ChatTemplate) -> None:
    _, _, backend = talk(template, says(template, "1"), ["<<", "one", "/quit", "", ".", "", "/quit"])
    assert sent(template, backend) == ["<|im_start|>user\none\n/quit\n<|im_end|>\n<|im_start|>assistant\n"]


def test_enter_without_anything_to_answer_asks_nobody(template: ChatTemplate) -> None:
    code, text, backend = talk(template, says(template, "1"), ["", "  ", "/system x", ""])
    assert (code, backend.requests) == (0, [])
    assert text.count("type a message") == 3


def test_tokens_are_shown_with_what_was_parsed(template: ChatTemplate) -> None:
    code, text, _ = talk(template, says(template, "hello"), ["the"], tokens=True)
    assert code == 0
    assert "prompt, " in text and "answer, 5 tokens, mean logprob -3.00" in text
    assert re.search(r"template    0 +│<\|im_start\|>│user│\\n +│$", text, re.M)
    assert re.search(r"given       0 +│t +│he +│$", text, re.M)
    assert re.search(r"sampled v0  1 +│he +│l +│l +│o +│<\|im_end\|>│$", text, re.M)
    assert "parsed: finish stop; parser none (no tools offered); template ChatML\n  content   'hello'" in text


def test_tokens_of_the_conversation_so_far_can_be_asked_for(template: ChatTemplate) -> None:
    _, text, _ = talk(template, says(template, "a", "b"), ["/tokens", "x", "y", "/tokens"])
    assert "nothing was sampled yet" in text
    assert text.count("prompt, ") == 2 and text.count("parsed: ") == 2


def test_drift_is_told_where_there_is_any(template: ChatTemplate) -> None:
    odd = [*template.encode("u"), *template.encode("ser"), template.eos_id]  # "user" in a way no encoder splits it
    _, text, _ = talk(template, lambda ids, params: answer(odd), ["x"], tokens=True)
    assert re.search(r"drift: the template would render \d+% of these ids differently \(the same text in other", text)
    special = [*template.encode("a<|im_start|>b"), template.eos_id]  # left out of the message's text
    _, text, _ = talk(template, lambda ids, params: answer(special), ["x"], tokens=True)
    assert "(the answer's special tokens are left out)" in text
    _, text, _ = talk(template, says(template, "user"), ["x"], tokens=True)
    assert "drift" not in text


def test_control_characters_of_a_model_do_not_reach_the_terminal(template: ChatTemplate) -> None:
    _, text, _ = talk(template, says(template, "\x1b[2J\x07red"), ["x", "/tokens"])
    assert "\x1b" not in text and "assistant: \\x1b[2J\\x07red" in text


def test_calls_reasoning_and_errors_are_shown(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model, source="chatml_tools")
    said = '<think>hm</think><tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call>'
    _, text, _ = talk(
        template, says(template, said, "42"), ["", "", ""], env="Calculator-v0", tokens=True, context=5000
    )
    assert "parsed: finish stop; parser hermes" in text
    assert "  reasoning 'hm'" in text and '  call      calculate({"expression": "6 * 7"})' in text
    assert "tool: 42" in text and "reward 0.2" in text
    _, text, _ = talk(template, says(template, said, "x"), [""], env="Calculator-v0", context=5000)
    assert 'assistant: hm\ncalculate({"expression": "6 * 7"})\n' in text
    assert "tools: calculate(expression)" in text


def test_enter_runs_one_step_of_model_and_environment(template: ChatTemplate) -> None:
    lines = ["", "say it", "too late", "", "/quit"]
    code, text, backend = talk(template, says(template, "1", "2"), lines, env=f"{THIS}:Countdown")
    assert code == 0
    assert text.count("user: count, seed 0") == 1 and text.count("user: count, seed 1") == 1
    assert "reward 0.5  left 1\nuser: 1 left\n" in text
    assert "terminated; reward of the episode: 1. Enter begins the next one." in text
    assert "the episode is over" in text, "a text after the end is answered by nobody"
    assert sent(template, backend)[1].endswith(
        "user\n1 left<|im_end|>\n<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("end", [EOFError(), KeyboardInterrupt(), "/quit"])
def test_the_environment_is_closed_however_it_ends(
    template: ChatTemplate, tiny_model: Path, end: str | BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.core.registry import load

    closed: list[str] = load("env", f"{THIS}:Countdown").closed
    with served(tiny_model) as url, handlers():
        out = io.StringIO()
        recipe = chat_recipe(url, [], env=f"{THIS}:Countdown", model=str(tiny_model))
        closed.clear()
        lines = iter(["", end])

        def read() -> str:
            line = next(lines)
            if isinstance(line, BaseException):
                raise line
            return line

        code = run_chat(recipe, tokens=True, console=Console(file=out, width=150), read=read)
    assert code == (130 if isinstance(end, KeyboardInterrupt) else 0)
    assert closed[-1] == "closed" and "reward 0.5" in out.getvalue()


def test_a_failed_turn_can_be_tried_again(template: ChatTemplate) -> None:
    failed: list[int] = []

    def script(ids: list[int], params: SamplingParams) -> Generation:
        if not failed:
            failed.append(1)
            raise InferenceError("connection refused")
        return answer([*template.encode("back"), template.eos_id])

    code, text, backend = talk(template, script, ["hi", "", "/quit"])
    assert code == 1, "a script must see that a turn failed"
    assert "no answer: connection refused (Enter tries again, /reset begins anew)" in text
    assert "assistant: back" in text
    assert sent(template, backend)[0] == sent(template, backend)[1]


def test_a_conversation_that_outgrows_the_context_says_so(template: ChatTemplate) -> None:
    code, text, _ = talk(template, says(template, "1"), ["hi " * 300, "/quit"])
    assert code == 1 and "does not fit inference.context_length=500 (/reset begins a new conversation)" in text


def test_an_episode_that_outgrows_the_context_is_judged(template: ChatTemplate) -> None:
    lines = ["", "long " * 300, "/quit"]
    code, text, _ = talk(template, says(template, "1"), lines, env=f"{THIS}:Countdown")
    assert code == 0
    assert "out of context; reward of the episode: 0.5" in text


def test_a_conversation_that_the_template_cannot_continue_is_refused_in_words(tiny_model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = REWRITING
    template = ChatTemplate(tokenizer)
    code, text, _ = talk(template, says(template, "1", "2"), ["hi", "and", "/reset", "hi", "/quit"])
    assert code == 1
    assert "no answer: this chat template rewrites earlier turns" in text and "inference.history=append" in text
    assert "(/reset begins a new conversation)" in text and "assistant: 2" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a model or the URL of a running server"),
        (["http://127.0.0.1:9"], "needs --model FOLDER"),
        (["http://127.0.0.1:9/v1"], "needs --model NAME"),
        (["no-such-model"], "model 'no-such-model' was not found"),
        (["x", "--model", "y"], "x is the model already"),
        (["x", "sampling.temprature=0"], "did you mean 'sampling.temperature'"),
        (["sampling.temprature=0"], "did you mean 'sampling.temperature'"),
        (["x", "--env", "calculatr"], "did you mean 'calculator'"),
        (["x", "--env", "calculator", "env.kwargs.exampels=1"], "exampels"),
        (["x", "--recipe", "calculator_gpro"], "did you mean 'calculator_grpo'"),
        (["x", "--engine", "sglangg"], "did you mean 'sglang'"),
        (["http://h/v1", "--model", "m", "--tokens"], "--tokens needs token ids"),
        (["x", "model.chat_template=chatml_tool"], "did you mean 'chatml_tools'"),
        (["x", "agent.id=chatt"], "did you mean 'chat'"),
        (["http://127.0.0.1:9", "--model", "TINY"], "no server of the kind inference.engine=embedded answers"),
        (["TINY", "--env", f"{THIS}:Nothing"], "has no 'Nothing'"),
    ],
)
def test_bad_input_is_one_message_and_code_2(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, arguments: list[str], words: str
) -> None:
    with handlers(), pytest.raises(SystemExit) as caught:
        main(["chat", *(str(tiny_model) if one == "TINY" else one for one in arguments)])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_arguments_become_a_recipe() -> None:
    plain = chat_recipe("m", ["sampling.temperature=0"])
    assert (plain.model.name, plain.env.id, plain.trainer.type) == ("m", NO_ENV, None)
    assert (plain.sampling.temperature, plain.inference.urls) == (0, ())
    recipe = chat_recipe(None, [], recipe="calculator_grpo")
    assert recipe.model.chat_template == "chatml_tools" and recipe.env.kwargs == {"examples": 2}
    assert recipe.trainer.type is None and recipe.sampling.max_new_tokens == 40
    assert chat_recipe(None, [], recipe="calculator_grpo", env=NO_ENV).env.id == NO_ENV
    other = chat_recipe("m", [], recipe="calculator_grpo", env="gsm8k")
    assert (other.model.name, other.env.id, other.env.kwargs) == ("m", "gsm8k", {})
    own = chat_recipe("http://h:1", [], engine="vllm", model="folder")
    assert (own.inference.engine, own.inference.urls, own.model.name) == ("vllm", ("http://h:1",), "folder")
    api = chat_recipe("http://h/v1", [], model="name")
    assert (api.inference.engine, api.model.name) == ("openai", "name")
    with pytest.raises(ConfigError, match="needs --model"):
        chat_recipe("http://h/v1", [], recipe="calculator_grpo")
    assert chat_recipe("http://h", [], recipe="calculator_grpo").model.name == recipe.model.name


@contextmanager
def handlers() -> Iterator[None]:
    """Signal handlers as they were, for calls in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("in_text", [False, True])
def test_a_running_server_is_used_and_left_running(tiny_model: Path, in_text: bool) -> None:
    with served(tiny_model) as url, handlers():
        name = f"{url}/v1" if in_text else url
        lines = iter(["hi", "more", "/tokens"])
        out = io.StringIO()

        def read() -> str:
            line = next(lines, None)
            if line is None:
                raise EOFError
            return line

        recipe = chat_recipe(name, ["sampling.max_new_tokens=5"], model=str(tiny_model))
        for _ in range(2):
            assert run_chat(recipe, tokens=False, console=Console(file=out, width=150), read=read) == 0
    text = out.getvalue()
    assert text.count("assistant: ") == 2
    assert ("this server returns no token ids" in text) == in_text
    assert ("temperature 1, up to 5 tokens an answer, 512 tokens a conversation" in text) == (not in_text)


class Silent(BaseHTTPRequestHandler):
    """A server that is alive and never answers a question."""

    asked = threading.Event()
    over = threading.Event()

    def do_GET(self) -> None:
        """It is alive."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        """No answer."""
        self.asked.set()
        self.over.wait(SECONDS)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def start(*arguments: str, temporary: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command("chat", *arguments), env={**environment(), "TMPDIR": str(temporary)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="surrogateescape",
    )  # fmt: skip


def engine_of(process: "subprocess.Popen[str]") -> psutil.Process:
    """The server that a chat has started."""
    family = psutil.Process(process.pid).children(recursive=True)
    (child,) = [one for one in family if "agentrl.engine" in one.cmdline()]
    return child


def wait_for(process: "subprocess.Popen[str]", word: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if word in line:
            return text
    raise AssertionError(f"{word!r} was never printed: {text}")


@contextmanager
def silent() -> Iterator[str]:
    """URL of a server that never answers a question."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Silent.asked.clear()
    Silent.over.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Silent.over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x04", 0)])
def test_in_a_terminal_a_key_ends_it_and_the_terminal_is_as_before(tiny_model: Path, key: bytes, code: int) -> None:
    mine, its = pty.openpty()
    before = termios.tcgetattr(mine)
    with silent() as url:
        process = subprocess.Popen(
            command("chat", url, "--model", str(tiny_model)), env={**environment(), "TERM": "xterm"},
            stdin=its, stdout=its, stderr=its, preexec_fn=partial(_own_terminal, its),
        )  # fmt: skip
        shown = b""
        while b"you: " not in shown:
            shown += os.read(mine, 4096)
        assert _press(mine, key, process) == code, shown
    assert termios.tcgetattr(mine) == before
    os.close(mine)
    os.close(its)


def _press(terminal: int, key: bytes, process: "subprocess.Popen[bytes]") -> int:
    """Presses a key until the process ends: a signal between CPython's prompt and its select waits for the next key."""
    for _ in range(SECONDS // 5):
        os.write(terminal, key)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(5)
    raise AssertionError("the key did not end the chat")


def _own_terminal(its: int) -> None:
    """Makes a terminal the controlling one, so that its keys send signals."""
    os.setsid()
    fcntl.ioctl(its, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_an_answer_ends_it(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    with silent() as url:
        process = start(url, "--model", str(tiny_model), "--env", f"{THIS}:Countdown", temporary=tmp_path)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert Silent.asked.wait(SECONDS)
        process.send_signal(number)
        output = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 130, output
    assert output.endswith("\nstopped\n") and "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def test_a_script_drives_a_chat_with_a_server_of_its_own_and_nothing_is_left(tiny_model: Path, tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    process = start(str(tiny_model), "--tokens", "sampling.max_new_tokens=5", "inference.threads=1", temporary=tmp_path)
    assert process.stdin is not None
    text = wait_for(process, "sample  temperature 1, up to 5 tokens an answer, 512 tokens a conversation")
    child = engine_of(process)
    output, _ = process.communicate("hi \udcff\n/quit\n", timeout=SECONDS)
    assert process.returncode == 0, output
    assert "you: hi \ufffd" in output and "parsed: finish" in output and "Traceback" not in text + output
    assert not child.is_running()
    assert list(tmp_path.iterdir()) == [] and set(os.listdir("/dev/shm")) <= shared


def test_a_server_that_is_killed_ends_the_chat_with_its_log(tiny_model: Path, tmp_path: Path) -> None:
    process = start(str(tiny_model), "inference.threads=1", temporary=tmp_path)
    assert process.stdin is not None
    wait_for(process, "sample  ")
    child = engine_of(process)
    child.suspend()  # so that it is killed in the middle of the answer
    process.stdin.write("hi\n")
    process.stdin.flush()
    wait_for(process, "you: hi")
    child.kill()
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "server-0 was killed by SIGKILL; the end of" in output and "Traceback" not in output
    assert list(tmp_path.iterdir()) == []
