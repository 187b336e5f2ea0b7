"""Every command of docs/evaluation.md is executed, in its order, against an API that answers."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.cli.main import main
from agentrl.launch import bounded_run
from tests.launch.test_evaluation_api import Api, answer

PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
URL = "http://127.0.0.1:8000/v1"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


async def test_the_commands_run_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bounded_run, "end_within", lambda seconds, code: None)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "sums.csv").write_text("prompt,answer\n" + "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(12)))

    def reply(number: int, body: dict[str, Any]) -> web.Response:
        first, second = map(int, re.findall(r"\d+", body["messages"][0]["content"])[:2])
        return answer(content=str(first + second + (number % 3 == 0)))

    shown = commands()
    assert len(shown) > 10
    async with Api(reply).serving() as url:

        def run(line: str) -> str:
            with pytest.raises(SystemExit) as ended:
                main(shlex.split(line.replace(URL, url))[1:])
            out = capsys.readouterr().out
            assert ended.value.code == 0, f"{line}\n{out}"
            return out

        said = {line: await asyncio.to_thread(run, line) for line in shown}
    text = "\n".join(said.values())
    assert all(max(map(len, out.splitlines())) <= 200 for out in said.values())
    for part in (
        "all evaluations",
        "eval.until_ci=0.15 is reached after",
        "B against A",
        "tasks better in B",
        "| NAME |",
    ):
        assert part in text
    for name in ("report.md", "report.html", "dataset", "inspect"):
        assert (tmp_path / "runs" / "first" / name).exists()
