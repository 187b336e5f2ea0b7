"""What the shell offers for a word, in Python, in a real bash and, where it is installed, in a real zsh."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer._completion_shared import get_completion_script

from agentrl.cli.completion import (
    complete_environment,
    complete_evaluated,
    complete_override,
    complete_recipe,
    complete_run,
)
from agentrl.cli.completion_scripts import use_own_scripts
from agentrl.config.keys import fields, section_of
from agentrl.config.overrides import parse_override
from tests.end_to_end import environment

SHOP = "from agentrl import ToolEnvironment\n\n\nclass MyShop(ToolEnvironment):\n    pass\n"


def script_of(shell: str) -> str:
    """What ``agentrl --show-completion`` prints in a shell, whichever this one is."""
    use_own_scripts()
    return get_completion_script(prog_name="agentrl", complete_var="_AGENTRL_COMPLETE", shell=shell)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an environment, a recipe and a run."""
    for place, text in (
        ("envs/my_shop.py", SHOP),
        ("recipes/my_shop_grpo.yaml", "env: {id: my_shop}\n"),
        ("runs/first/config.json", "{}"),
    ):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(text)
    (tmp_path / "runs" / "no_run").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_names_are_completed() -> None:
    assert complete_recipe("my") == ["my_shop_grpo"]
    assert complete_environment("") == ["arithmetic", "calculator", "gsm8k", "my_shop", "python", "retry", "shapes"]
    assert complete_evaluated("my") == ["my_shop_grpo", "my_shop"]
    assert complete_run("") == ["first"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("trainer.lear", ["trainer.learning_rate="]),
        ("train", ["train_dataset.", "trainer."]),
        ("see", ["seed="]),
        ("rollout.cur", ["rollout.curriculum."]),
        ("trainer.schedule=", [f"trainer.schedule={one}" for one in ("constant", "linear", "cosine")]),
        ("trainer.schedule=c", ["trainer.schedule=constant", "trainer.schedule=cosine"]),
        ("trainer.compile=", ["trainer.compile=true", "trainer.compile=false"]),
        ("env.id=my", ["env.id=my_shop"]),
        ("agent.id=", ["agent.id=chat", "agent.id=tool_loop"]),
        ("train_dataset.name=e", ["train_dataset.name=env"]),
        ("inference.history=", [f"inference.history={one}" for one in ("append", "branch", "null")]),
        ("trainer.type=s", ["trainer.type=sft"]),
        ("trainer.preset=gs", ["trainer.preset=gspo"]),
        ("name=f", ["name=first"]),
        ("no_such=", []),
    ],
)
def test_keys_and_values_are_completed(begun: str, offered: list[str]) -> None:
    assert complete_override(begun) == offered


def test_every_key_is_reached_and_every_value_is_accepted() -> None:
    reached: set[str] = set()
    waiting = [""]
    while waiting:
        for one in complete_override(waiting.pop()):
            waiting += [one] if one.endswith(".") else []
            reached |= {one} if one.endswith("=") else set()
    assert reached == {f"{key}=" for key, field in fields().items() if section_of(field) is None}
    for key in reached:
        for setting in complete_override(key):
            assert parse_override(setting)[0] == key[:-1]


STARTS = {
    "bash": (["--norc", "--noprofile", "-i"], "bind 'set bell-style none'; source complete.sh; echo LOA''DED\n"),
    "zsh": (
        ["-f", "-i"],
        "unsetopt beep; unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D; source complete.sh;"
        " echo LOA''DED\n",
    ),
}  # options of the shell, and what loads the completion script


@pytest.fixture
def shell(folder: Path) -> "Shell":
    return Shell(folder, "bash")


class Shell:
    """An interactive shell on a terminal, which has loaded the completion script."""

    def __init__(self, folder: Path, name: str) -> None:
        bash = shutil.which(name)
        assert bash is not None
        options, load = STARTS[name]
        (folder / "bin").mkdir()
        program = folder / "bin" / "agentrl"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m agentrl "$@"\n')
        program.chmod(0o755)
        env = environment() | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PS1": "READY> ", "TERM": "dumb"}
        (folder / "complete.sh").write_text(script_of(name))
        mine, its = pty.openpty()
        self._terminal = mine
        self._bash = subprocess.Popen(
            [bash, *options], stdin=its, stdout=its, stderr=its, cwd=folder, env=env,
            start_new_session=True,
        )  # fmt: skip
        os.close(its)
        self.type(load, "LOADED")

    def type(self, text: str, until: str, seconds: float = 60.0) -> str:
        """Type a text, and return what the terminal shows until some words come."""
        os.write(self._terminal, text.encode())
        shown, deadline = "", time.monotonic() + seconds
        while until not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([self._terminal], [], [], 0.5)[0]:
                shown += os.read(self._terminal, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        self._bash.kill()
        self._bash.wait()
        os.close(self._terminal)


def test_bash_completes_a_key_without_a_blank_and_a_value_behind_it(shell: Shell) -> None:
    shell.type("printf '<%s>' : agentrl\n", "<agentrl>")
    shell.type("alias shown=true\n", "READY> ")
    shell.type("agentrl recipe show arith\t", "arithmetic_grpo ")
    shell.type("trainer.sched\t", "schedule=")
    shell.type("cosi\t", "cosine ")
    shell.type("trainer.learning_ra\t", "learning_rate=")
    told = shell.type("3e-5 | grep -E '^  (schedule|learning_rate):'; echo EN''DED\n", "ENDED")
    shell.close()
    assert "schedule: cosine" in told and "learning_rate: 3" in told, told


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed: apt-get install zsh")
def test_zsh_completes_a_key_without_a_blank_and_a_value_behind_it(folder: Path) -> None:
    shell = Shell(folder, "zsh")
    shell.type("agentrl recipe show arith\t", "arithmetic_grpo ")
    shell.type("trainer.sched\t", "schedule=")
    shell.type("cosi\t", "cosine ")
    shell.type("trainer.learning_ra\t", "learning_rate=")
    told = shell.type("3e-5 | grep -E '^  (schedule|learning_rate):'; echo EN''DED\n", "ENDED")
    shell.close()
    assert "schedule: cosine" in told and "learning_rate: 3" in told, told


def test_the_script_for_zsh_puts_no_blank_behind_a_key() -> None:
    """Where there is no zsh, its text alone is looked at."""
    assert "compadd -S '' -- $more" in script_of("zsh") and "%" not in script_of("zsh")
