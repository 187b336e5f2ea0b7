"""Inspect AI's library reads an exported log, and its viewer shows it.

Long: Inspect AI has an environment of its own, because its requirements are not ours. ``$AGENTRL_INSPECT_PYTHON`` names
an interpreter that has it; else one is made, and where that cannot be, the tests say why they are skipped.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from agentrl.launch.export_inspect import is_listed
from agentrl.launch.exported import export
from tests.launch.test_evaluation_api import Api, answer, evaluated, refusal

pytestmark = pytest.mark.long
SECONDS = 60.0
HOSTILE = "<img src=x onerror=\"document.title='taken'\"> #### 3"


@pytest.fixture(scope="module")
def inspect_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with Inspect AI: that of ``$AGENTRL_INSPECT_PYTHON``, or of a new environment."""
    given = os.environ.get("AGENTRL_INSPECT_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("inspect")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    made = subprocess.run([python, "-m", "pip", "install", "-q", "inspect-ai"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"inspect-ai cannot be installed here: {made.stderr.strip()[-300:]}")
    return python


async def exported(folder: Path) -> tuple[Path, str, dict[str, Any]]:
    """The log of an evaluation with tools, thoughts, several samples, hostile text and a lost episode."""
    call = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "1+1"}'}}

    def reply(number: int, body: dict[str, Any]) -> web.Response:
        if number == 9:
            return refusal(400, message="no")
        asked = body["messages"][-1]["role"] != "tool"
        if asked:
            return answer("tool_calls", content=None, tool_calls=[call], reasoning_content="I should compute.")
        return answer(content=HOSTILE)

    own = ("env.id=calculator", "valid_dataset.name=calculation", "agent.id=chat", "rollout.max_concurrent=1")
    more = ("eval.tasks=3", "eval.samples=2", "env.kwargs={}", "sampling.eval_temperature=1.0")
    _, text, result = await evaluated(Api(reply), folder, *more, *own)
    path = export(folder, "inspect", None, Console(quiet=True))
    assert path is not None and is_listed(path) and result["eval/invalid"] == 1, text
    return path, text, result


READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
log = read_eval_log(sys.argv[1])
listed = [one.name.split("/")[-1] for one in list_eval_logs(sys.argv[2])]
scores = {one.name: one.metrics["mean"].value for one in log.results.scores}
errors = sum(one.error is not None for one in log.samples)
calls = [call.function for one in log.samples for m in one.messages for call in (getattr(m, "tool_calls", None) or [])]
print(json.dumps([log.status, len(log.samples), errors, scores["accuracy"], log.eval.model, calls, listed]))
"""


async def test_inspects_library_reads_the_log(tmp_path: Path, inspect_python: str) -> None:
    path, text, result = await exported(tmp_path)
    command = [inspect_python, "-c", READ, str(path), str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status, samples, errors, accuracy, model, calls, listed = json.loads(done.stdout)
    assert (status, samples, errors, model) == ("success", 6, result["eval/invalid"], "openai-api/m"), text
    assert accuracy == pytest.approx(result["eval/accuracy"]) and calls.count("calculate") >= 5
    assert listed == [path.name], "the viewer lists what the library lists"


@contextmanager
def viewer(python: str, folder: Path) -> Iterator[str]:
    """Inspect's viewer of a folder of logs; gives its address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [str(Path(python).parent / "inspect"), "view", "start", "--log-dir", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "http" in line:
                break
        assert process.poll() is None, said
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(SECONDS)


def test_inspects_viewer_shows_the_log_and_each_sample(tmp_path: Path, inspect_python: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if shutil.which("chromium") is None:
        pytest.skip("no chromium: apt-get install chromium")
    path, _, _ = asyncio.run(exported(tmp_path))
    wrong: list[str] = []
    with viewer(inspect_python, path.parent) as url, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(SECONDS * 1000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("response", lambda got: got.status >= 400 and "/api/flow" not in got.url and wrong.append(got.url))
        page.goto(url)
        first = json.loads(path.read_text())["samples"][0]["id"]
        sample = page.locator(f"text={first} >> visible=true").first  # the only log of a folder is opened at once
        sample.wait_for()
        assert "1 of 6 samples (17%) had errors and were not scored" in page.inner_text("body")
        keep(page, "inspect_samples")
        sample.click()
        page.locator("text=onerror= >> visible=true").first.wait_for()
        shown = page.inner_text("body")
        assert "I should compute." in shown and 'expression: "1+1"' in shown and f"Sample {first}" in shown
        keep(page, "inspect_sample")
        assert page.title() != "taken"
        browser.close()
    assert wrong == []


def keep(page: Any, name: str) -> None:
    """Keeps a picture, where ``$AGENTRL_SCREENSHOTS`` names a folder for them."""
    folder = os.environ.get("AGENTRL_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")
