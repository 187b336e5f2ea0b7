"""An environment is named in the same ways in every command."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cli.main import main
from tests.chat_api import chat_api
from tests.end_to_end import ROOT, overrides, run

WAYS = [
    "calculator",
    "Calculator-v0",
    "my_shop",
    "my_shop-v0",
    "MyShop",
    "envs/my_shop.py",
    "envs/my_shop.py:MyShop",
    "my_env.py",
    "my_env.py:Shout",
    "{folder}/my_env.py:Shout",
    "shop_pkg.shout:Shout",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with README's environment, a new one in ./envs, and a package."""
    made = tmp_path_factory.mktemp("ways")
    assert run("env", "new", "my_shop", cwd=made).returncode == 0
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (made / "my_env.py").write_text(block)
    (made / "shop_pkg").mkdir()
    (made / "shop_pkg" / "__init__.py").touch()
    (made / "shop_pkg" / "shout.py").write_text(block)
    return made


def tiny_config(folder: Path) -> Path:
    """A model's folder with as much as a plan needs."""
    config = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 16}))
    return folder


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with chat_api("I LIKE TEA") as url:
        yield url


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", ["check", "play", "eval", "recipe run"])
def test_every_command_takes_every_way(
    command: str, way: str, folder: Path, api: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(folder))])
    name = way.format(folder=folder)
    output = folder / f"eval-{WAYS.index(way)}"
    arguments = {
        "check": ["env", "check", name, "--episodes", "2"],
        "play": ["env", "play", name, "--seed", "1"],
        "eval": ["eval", name, "--base-url", api, "--model", "m", "--n", "1", "--output", str(output)],
        "recipe run": ["recipe", "run", "calculator_grpo", f"env.id={name}", "--dry-run"],
    }[command]
    if command == "recipe run":
        arguments.append(f"model.name={tiny_config(folder)}")
    typed = iter(["I LIKE TEA", "/quit"])
    monkeypatch.setattr("rich.console.Console.input", lambda *_, **__: next(typed))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    assert not ended.value.code, told.out + told.err
    if command == "eval":
        assert json.loads((output / "result.json").read_text())["eval/n"] == 1
    if command == "play":
        assert "reward of the episode" in told.out


def test_a_recipe_trains_on_a_module_of_the_working_folder(folder: Path, tiny_model: Path) -> None:
    own = [s for s in overrides(tiny_model, folder / "runs", "module") if not s.startswith("env.id")]
    own += ["env.id=shop_pkg.shout:Shout", "train_dataset.name=env", "valid_dataset.name=env"]
    result = run("recipe", "run", "arithmetic_grpo", *own, "trainer.total_steps=1", cwd=folder)
    assert result.returncode == 0, result.stdout
    record = json.loads((folder / "runs" / "module" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= record["metrics/capitals"] <= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_envv.py", "no file my_envv.py (looked in "),
        ("my_envv.py:Shout", "no file my_envv.py (looked in "),
        ("my_env.py:Shoutt", "my_env.py has no 'Shoutt', did you mean 'Shout'?"),
        ("my_env", "did you mean 'my_env.py'?"),
        ("shop_pkg.shoot:Shout", "no module 'shop_pkg.shoot' (looked in "),
        ("shop_pkg.shout:Shoutt", "shop_pkg.shout has no 'Shoutt', did you mean 'Shout'?"),
        ("my_shopp", "did you mean 'my_shop'?"),
        ("calculatr", "did you mean 'calculator'?"),
    ],
)
@pytest.mark.parametrize("command", ["check", "play", "eval", "recipe run"])
def test_every_command_answers_a_wrong_name_alike(
    command: str,
    name: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    api = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    arguments = {
        "check": ["env", "check", name],
        "play": ["env", "play", name],
        "eval": ["eval", name, *api, "--n", "1"],
        "recipe run": ["recipe", "run", "calculator_grpo", f"env.id={name}", "--dry-run"],
    }[command]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    assert ended.value.code, told.out
    assert message in " ".join((told.out + told.err).split()), told.out + told.err


def test_gymnasium_finds_local_environments(folder: Path) -> None:
    code = (
        "import agentrl, gymnasium\n"
        "for name in ('my_shop', 'MyShop'):\n"
        "    env = gymnasium.make(f'agentrl/{name}-v0')\n"
        "    messages, info = env.reset(seed=0)\n"
        "    print(env.spec.id, messages[0]['role'])\n"
        "    env.close()\n"
        "assert not any('gsm8k' in id for id in gymnasium.registry)\n"
    )
    for order in (code, code.replace("agentrl, gymnasium", "gymnasium, agentrl")):
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        result = subprocess.run([sys.executable, "-c", order], cwd=folder, env=env, capture_output=True, text=True)
        assert result.stdout == "agentrl/my_shop-v0 user\nagentrl/MyShop-v0 user\n", result.stderr
