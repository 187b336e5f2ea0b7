"""docs/environments.md, walked by a reader: its commands in an empty folder, in order, and its Python."""

import asyncio
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.registry import load
from tests.end_to_end import SECONDS, command, environment, overrides, run
from tests.test_docs import WALK, shown_commands

TEXT = WALK.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = shown_commands([WALK])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


def block(word: str) -> str:
    """The Python block that has ``word`` in it."""
    (found,) = [one for one in BLOCKS if word in one]
    return found


def test_the_commands_lead_from_an_empty_folder_to_a_trained_environment(folder: Path, roomy_model: Path) -> None:
    own = [s for s in overrides(roomy_model, folder / "runs", "shown") if not s.startswith("env.id")]
    own += ["trainer.total_steps=1", "inference.context_length=2048", "trainer.tokens_per_microbatch=4096"]
    seen: set[str] = set()
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        kind = " ".join(words[:2]) + (" --dry-run" if "--dry-run" in words else "")
        seen.add(kind)
        if kind == "env play":
            played = subprocess.run(
                command(*words), cwd=folder, env=environment(), text=True, capture_output=True, timeout=SECONDS,
                input='/cost {"item": "pen", "count": 3}\nI do not know\n',
            )  # fmt: skip
            assert played.returncode == 0, played.stderr
            assert "tool: 6" in played.stdout and "terminated; reward of the episode: 0.2" in played.stdout
            continue
        more = own if kind.startswith("recipe run") else []
        if "--model" in words:
            words[words.index("--model") + 1] = str(roomy_model)
            more = [
                part
                for one in ("inference.context_length=2048", "sampling.max_new_tokens=8")
                for part in ("--set", one)
            ]
        if kind.startswith("eval"):
            more = ["--output", str(folder / "eval"), "inference.context_length=2048"]
            more += ["inference.threads=1", "sampling.max_new_tokens=8"]
        result = run(*words, *more, cwd=folder)
        assert result.returncode == 0, f"{line}\n{result.stdout}"
    assert seen == {
        "env new", "env list", "env check", "env play", "recipe run", "recipe run --dry-run", "eval my_shop_grpo",
    }  # fmt: skip
    record = json.loads((folder / "runs" / "shown" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"train/loss", "metrics/tool_calls"} <= record.keys()


def test_the_page_shows_what_new_writes(folder: Path) -> None:
    run("env", "new", "my_shop", "--folder", "again", cwd=folder)
    assert block("class MyShop") == (folder / "again" / "envs" / "my_shop.py").read_text()


def test_gymnasium_is_used_as_shown() -> None:
    names: dict[str, Any] = {}
    exec(block("import gymnasium"), names)
    assert names["terminated"] and names["twin"].digit_reward == 0.5


def test_the_lake_is_an_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("envs").mkdir(exist_ok=True)
    Path("envs/lake.py").write_text(block("FrozenLake"))
    env = load("env", "lake")()

    async def episode() -> tuple[float, bool]:
        await env.reset(options={"seed": 3})
        for move in ("down", "down", "right", "right", "down", "right"):
            action = {"role": "assistant", "content": f"<action>{move}</action>"}
            _, reward, terminated, _, _ = await env.step(action)
        await env.close()
        return reward, terminated

    assert asyncio.run(episode()) == (1.0, True)
    (line,) = Path("episodes/episodes.jsonl").read_text().splitlines()
    assert json.loads(line)["finished"]


def test_the_guessing_game_keeps_the_contract(folder: Path) -> None:
    (folder / "envs").mkdir(exist_ok=True)
    (folder / "envs" / "guess.py").write_text(block("class Guess"))
    result = run("env", "check", "guess", "--strict", cwd=folder)
    assert result.returncode == 0, result.stdout


async def test_the_rubric_judges() -> None:
    names: dict[str, Any] = {"__name__": "shown"}
    exec(block("class Algebra"), names)
    env = names["Algebra"]()
    await env.reset(options=names["Algebra"].dataset[0])
    *_, info = await env.step({"role": "assistant", "content": r"So \boxed{2^{1/2}}"})
    assert info["metrics"] == {"accuracy": 1.0, "boxed": 1.0}


@pytest.mark.usefixtures("needs_sandbox")
async def test_the_sandbox_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(block("make_sandbox"), names)
    await names["main"]()
    assert "42" in capsys.readouterr().out


def test_every_setting_and_class_that_the_page_names_exists() -> None:
    import agentrl.rewards
    import agentrl.wrappers
    from agentrl.config.recipe import Recipe

    for name in re.findall(r"^\| (`[A-Za-z_`, ]+`)[^|]* \|", TEXT, re.MULTILINE):
        for one in re.findall(r"`(\w+)`", name):
            assert hasattr(agentrl, one) or hasattr(agentrl.rewards, one) or hasattr(agentrl.wrappers, one), one
    for key in re.findall(r"`((?:reward|trainer|env|agent|workflow)\.\w+)`", TEXT):
        section, _, field = key.partition(".")
        model = Recipe.model_fields[section].annotation
        assert field in model.model_fields, key  # type: ignore[union-attr]
