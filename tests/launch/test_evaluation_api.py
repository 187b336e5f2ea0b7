"""An evaluation against an API loses no task: rate limits, failures, refused options, resume and Ctrl-C."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from agentrl.cli.recipe import exit_code
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.evaluate.judged import ResumeError, check_evaluated
from agentrl.inference import api_calls
from agentrl.launch.evaluation import evaluate_recipe
from agentrl.launch.results import EvalResult, RunFailed
from agentrl.launch.supervisor import ChildFailed

Reply = Callable[[int, dict[str, Any]], web.Response | None]


def answer(finish: str = "stop", **message: Any) -> web.Response:
    said = {"role": "assistant", "content": "42", **message}
    choice = {"index": 0, "finish_reason": finish, "message": said}
    return web.json_response({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


def refusal(status: int, headers: dict[str, str] | None = None, **error: Any) -> web.Response:
    return web.json_response({"error": {"message": "no", **error}}, status=status, headers=headers)


class Api:
    """A fake API.

    Args:
        reply: Function of the number of the request and its body; ``None`` for an ordinary answer.
        most: Requests at a time; others get 429.
        seconds: Time of an answer.
    """

    def __init__(self, reply: Reply = lambda number, body: None, most: int = 1000, seconds: float = 0.0) -> None:
        self.reply, self.most, self.seconds = reply, most, seconds
        self.requests: list[dict[str, Any]] = []
        self.running = self.refused = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if self.running >= self.most:
            self.refused += 1
            return refusal(429, code="rate_limit_exceeded")
        self.running += 1
        try:
            self.requests.append(body)
            number = len(self.requests)  # its own: others come while it waits
            await asyncio.sleep(self.seconds)
            return self.reply(number, body) or answer()
        finally:
            self.running -= 1

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        async with TestServer(app) as server:
            yield str(server.make_url("/v1"))


def run(recipe: Recipe, folder: Path, console: Console, *, resume: bool = False) -> int:
    """Exit code of an evaluation, as the command line has it."""

    def work() -> EvalResult:
        try:
            return evaluate_recipe(recipe, folder, console, resume=resume)
        except ChildFailed as error:
            raise RunFailed(str(error), None) from error

    return exit_code(console, work)


async def evaluated(api: Api, folder: Path, *settings: str, resume: bool = False) -> tuple[int, str, dict[str, Any]]:
    """Exit code, printed text and result of an evaluation on a fake API."""
    out = io.StringIO()
    async with api.serving() as url:
        own = [
            "trainer.type=null", "inference.engine=openai", f"inference.urls=['{url}']", "inference.model=m",
            "sampling.max_new_tokens=9",
        ]  # fmt: skip
        recipe = load_recipe("arithmetic_grpo", [*own, *settings], device="cpu")
        console = Console(file=out, width=160)
        code = await asyncio.to_thread(run, recipe, folder, console, resume=resume)
    path = folder / "result.json"
    return code, out.getvalue(), json.loads(path.read_text()) if path.is_file() else {}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_calls, "FIRST_WAIT", 0.02)


async def test_with_ten_requests_allowed_and_128_at_a_time_all_200_tasks_are_judged(tmp_path: Path) -> None:
    api = Api(most=10, seconds=0.01)
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=200", "rollout.max_concurrent=128")
    assert code == 0 and api.refused > 0 and len(api.requests) == 200
    assert (result["eval/n"], result["eval/invalid"]) == (200, 0)
    (note,) = result["notes"]
    assert f"{api.refused} requests were repeated (429: {api.refused}); down to " in note and note in text
    assert api.refused < 400, "the number of requests at a time came down to what is allowed"


async def test_time_that_the_api_asks_for_is_not_the_episodes_own(tmp_path: Path) -> None:
    api = Api(lambda number, body: refusal(429, {"retry-after": "1.6"}) if number == 1 else None)
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=1", "rollout.episode_timeout=1.5")
    assert code == 0 and result["eval/n"] == 1, text


async def test_failures_of_the_server_and_lost_connections_are_repeated(tmp_path: Path) -> None:
    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        return [None, refusal(500), refusal(503, {"retry-after": "0.01"}), refusal(408)][number % 4]

    code, _, result = await evaluated(Api(reply), tmp_path, "eval.tasks=12")
    assert code == 0 and result["eval/n"] == 12
    assert all(f"{status}: " in result["notes"][0] for status in (500, 503, 408))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, {"message": "Incorrect API key provided"}),
        (403, {"message": "Country not supported"}),
        (404, {"message": "The model `m` does not exist"}),
        (429, {"message": "You exceeded your current quota", "code": "insufficient_quota"}),
    ],
)
async def test_what_all_requests_would_meet_ends_the_command_at_once(
    status: int, error: dict[str, str], tmp_path: Path
) -> None:
    api = Api(lambda number, body: refusal(status, None, **error))
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=200", "rollout.max_concurrent=4")
    assert code == 1 and not result and len(api.requests) <= 8
    assert "the evaluation ended: http://127.0.0.1" in text and error["message"] in text


async def test_a_server_that_never_answered_ends_the_command(tmp_path: Path) -> None:
    out = io.StringIO()
    own = ["trainer.type=null", "inference.engine=openai", "inference.urls=['http://127.0.0.1:9/v1']"]
    recipe = load_recipe("arithmetic_grpo", [*own, "inference.model=m", "eval.tasks=50"], device="cpu")
    code = await asyncio.to_thread(run, recipe, tmp_path, Console(file=out, width=160))
    assert code == 1 and "http://127.0.0.1:9/v1/chat/completions: APIConnectionError" in out.getvalue()


async def test_patience_ends_and_the_lost_tasks_are_said_and_tried_again(tmp_path: Path) -> None:
    bad = True

    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        return refusal(429, {"retry-after": "60"}) if bad and "30 + 31" in body["messages"][-1]["content"] else None

    settings = ("eval.tasks=5", "inference.retry_seconds=1", "rollout.max_concurrent=1")
    code, text, result = await evaluated(Api(reply), tmp_path, *settings)
    assert (code, result["eval/n"], result["eval/invalid"]) == (1, 4, 1)
    assert "1 of 5 episodes were lost" in text and "--resume" in text and "inference.retry_seconds=1" in text
    bad, again = False, Api(reply)
    code, _, result = await evaluated(again, tmp_path, *settings, resume=True)
    assert (code, result["eval/n"], len(again.requests)) == (0, 5, 1)


async def test_a_model_that_refuses_max_tokens_and_a_temperature_is_asked_without(tmp_path: Path) -> None:
    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        for option, why in (("max_tokens", "not supported"), ("temperature", "does not support 0")):
            if option in body:
                return refusal(400, message=f"'{option}' {why}", param=option, code="unsupported_parameter")
        return None

    api = Api(reply)
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=20", "rollout.max_concurrent=1")
    assert code == 0 and result["eval/n"] == 20 and len(api.requests) == 22
    assert api.requests[-1]["max_completion_tokens"] == 9 and "temperature" not in api.requests[-1]
    assert text.count("the model refuses the option max_tokens: max_completion_tokens was sent") == 1
    assert text.count("the model refuses the option temperature: the API's own was used") == 1


async def test_answers_that_say_nothing_are_counted_apart(tmp_path: Path) -> None:
    said = [
        answer(content=None, refusal="I will not."),
        answer("content_filter", content=None),
        refusal(400, code="content_filter", message="content management policy"),
        answer("length", content="4"),
        answer(content=" "),
    ]
    api = Api(lambda number, body: said[number - 1] if number <= len(said) else None)
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=10", "rollout.max_concurrent=1")
    assert code == 0 and result["eval/n"] == 10
    assert result["answers"] == {"all": 10, "refused": 1, "filtered": 2, "cut": 1, "empty": 1}
    assert "answers filtered" in text and "2 of 10" in text


async def test_another_set_up_is_not_gone_on_with(tmp_path: Path) -> None:
    await evaluated(Api(), tmp_path, "eval.tasks=2")
    with pytest.raises(ResumeError, match=r"measures something else.*temperature: 0.0, now 0.5"):
        await evaluated(Api(), tmp_path, "eval.tasks=2", "sampling.eval_temperature=0.5", resume=True)
    with pytest.raises(ResumeError, match="nothing to resume"):
        check_evaluated(tmp_path / "new")


@asynccontextmanager
async def command(url: str, folder: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that evaluates 40 tasks, one at a time."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentrl", "eval", "arithmetic", "--base-url", url, "--model", "m", "--n", "40",
        "--concurrency", "2", "--output", str(folder), *options,
        cwd=folder.parent, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "160"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> str:
    out, _ = await process.communicate()
    return out.decode()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
async def test_a_command_that_was_ended_goes_on_where_it_was(signum: signal.Signals, tmp_path: Path) -> None:
    held, reached = asyncio.Event(), asyncio.Event()
    folder = tmp_path / "x"
    api = Api()

    async def reply(request: web.Request) -> web.Response:
        api.requests.append(json.loads(await request.read()))
        if len(api.requests) > 15 and not held.is_set():
            if len(api.requests) == 17:  # two at a time are held, so 15 episodes have ended
                reached.set()
            await held.wait()
        return answer()

    api.answer = reply  # type: ignore[method-assign]
    async with api.serving() as url:
        async with command(url, folder) as process:
            await asyncio.wait_for(reached.wait(), 60)
            process.send_signal(signum)
            text = await ended(process)
        held.set()
        judged = len((folder / "eval-episodes.jsonl").read_text().splitlines())
        assert judged == 15
        if signum == signal.SIGINT:
            assert "so far, 15 of 40 episodes" in text and f"--output {folder} --resume" in text, text
            assert process.returncode == 130 and "Traceback" not in text
        else:
            (folder / "eval-episodes.jsonl").open("a").write('{"group_id": "eval0-1", "tas')  # was being written
        before = len(api.requests)
        async with command(url, folder, "--resume") as process:
            text = await ended(process)
    assert process.returncode == 0 and "15 of 40 episodes are judged" in text, text
    assert len(api.requests) - before == 25
    result = json.loads((folder / "result.json").read_text())
    assert result["eval/n"] == 40 and len(result["per_task"]["accuracy"]) == 40
