"""Foreign servers: which interpreter, which flags, and that they die with us."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agentrl.config.load import load_recipe
from agentrl.launch import commands
from agentrl.launch.servers import server_python


def test_the_interpreter_is_the_named_one_or_one_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert server_python(load_recipe("arithmetic_grpo", ["inference.python=/x/python"]).inference) == "/x/python"
    python = tmp_path / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    assert server_python(load_recipe("arithmetic_grpo", ["inference.engine=sglang"]).inference) == str(python)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_limits_and_own_flags_reach_the_server(engine: str) -> None:
    settings = [f"inference.engine={engine}", "inference.args=[--some-flag,7]", "inference.dtype=float32", "seed=3"]
    recipe = load_recipe("arithmetic_grpo", settings, device="cpu")
    make = commands.sglang_server if engine == "sglang" else commands.vllm_server
    command = make(recipe, Path("/model"), 123, "/python")
    assert command[-2:] == ["--some-flag", "7"]
    words = " ".join(command)
    for part in ("/python -m", "/model", "--port 123", "--dtype float32", "128", "seed 3"):
        assert part in words
    if engine == "vllm":
        assert "--logprobs-mode processed_logprobs" in words and "--enable-scale-out" in words


def test_a_tethered_program_takes_our_place_and_dies_with_its_parent() -> None:
    program = "import sys; print('up', flush=True); sys.stdin.read()"
    parent = (
        "import subprocess, sys; from agentrl.launch.commands import tethered; "
        f"child = subprocess.Popen(tethered(sys.executable, '-c', {program!r}), stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE, text=True); child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        assert program in child.cmdline(), "another process stands between"
        process.send_signal(signal.SIGKILL)
        child.wait(30)
