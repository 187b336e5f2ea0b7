"""Servers of a run: which interpreter, which flags, and that they die with us."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from agentrl.config.load import load_recipe
from agentrl.inference.kinds.kind import server_kind
from agentrl.launch import commands, servers
from agentrl.launch.servers import find_model, server_python, server_start


def test_the_interpreter_is_the_named_one_or_one_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert server_python(load_recipe("arithmetic_grpo", ["inference.python=/x/python"]).inference) == "/x/python"
    python = tmp_path / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    assert server_python(load_recipe("arithmetic_grpo", ["inference.engine=sglang"]).inference) == str(python)


@pytest.mark.parametrize("engine", ["embedded", "sglang", "vllm"])
def test_limits_and_own_flags_reach_the_server(engine: str, tmp_path: Path) -> None:
    settings = [f"inference.engine={engine}", "inference.args=[--some-flag,7]", "inference.dtype=float32", "seed=3"]
    recipe = load_recipe("arithmetic_grpo", [*settings, "inference.python=/python"], device="cpu")
    start = server_start(recipe, Path("/model"), tmp_path / "server-1.json", 1)
    command = commands.server(server_kind(engine), start, recipe.inference.args)
    assert command[1:3] == ["-m", "agentrl.launch.tethered"], "it would outlive us"
    assert command[-2:] == ["--some-flag", "7"]
    words = " ".join(command)
    for part in ("/python -m", "/model", "--dtype float32", "128", "seed 4"):
        assert part in words
    assert f"--port {start.port}" in words and (start.port > 0) == (engine != "embedded")
    assert (f"--ready-file {start.ready_file}" in words) == (start.port == 0)
    if engine == "vllm":
        assert "--logprobs-mode processed_logprobs" in words and "--enable-scale-out" in words


def test_a_servers_threads_are_its_environments(tmp_path: Path) -> None:
    for engine, threads in (("sglang", "2"), ("vllm", "2"), ("embedded", None)):
        settings = [f"inference.engine={engine}", "inference.python=/python", "inference.threads=2"]
        start = server_start(load_recipe("arithmetic_grpo", settings, device="cpu"), tmp_path, tmp_path / "x", 0)
        assert server_kind(engine).env(start).get("OMP_NUM_THREADS") == threads
    assert server_kind("vllm").env(start)["VLLM_SERVER_DEV_MODE"] == "1"


def test_servers_see_what_the_trainer_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(engine: str, *settings: str) -> tuple[str, dict[str, str]]:
        named = [f"inference.engine={engine}", "inference.python=/python", *settings]
        start = server_start(load_recipe("arithmetic_grpo", named, device="cpu"), tmp_path, tmp_path / "x", 0)
        return " ".join(server_kind(engine).command(start)), server_kind(engine).env(start)

    for engine in ("sglang", "vllm", "embedded"):
        words, env = started(engine)
        assert "--mm" not in words and "image" not in words and not any("_VLM_" in one for one in env)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    monkeypatch.setattr(servers, "resizes_with_pillow", lambda: True)
    words, env = started("sglang")
    assert "--disable-fast-image-processor" in words
    assert (env["SGLANG_MM_AVOID_RETOKENIZE"], env["SGLANG_VLM_CACHE_SIZE_MB"]) == ("1", "0")
    for unchanged in ("trainer.freeze=[vision]", "trainer.type=null"):
        assert "SGLANG_VLM_CACHE_SIZE_MB" not in started("sglang", unchanged)[1], "features stay those of the tower"
    assert '--mm-processor-cache-gb 0 --mm-processor-kwargs {"use_fast": false}' in started("vllm")[0]
    assert "image" not in started("embedded")[0]
    monkeypatch.setattr(servers, "resizes_with_pillow", lambda: False)  # both sides resize with torchvision
    assert "fast" not in started("sglang")[0] + started("vllm")[0]


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("sglang", "SGLANG_MM_AVOID_RETOKENIZE=1 SGLANG_VLM_CACHE_SIZE_MB=0 --disable-fast-image-processor"),
        ("vllm", "--mm-processor-cache-gb 0 --mm-processor-kwargs '{\"use_fast\": false}'"),
        ("embedded", ""),
    ],
)
def test_the_user_is_told_how_running_servers_must_read_images(
    engine: str, told: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "resizes_with_pillow", lambda: True)
    model = shutil.copytree(tiny_model, tmp_path / "model")

    def said(*settings: str) -> str:
        named = [f"inference.engine={engine}", f"model.name={model}", *settings]
        with (console := Console(width=1000)).capture() as shown:
            find_model(load_recipe("arithmetic_grpo", named, device="cpu"), console)
        return shown.get()

    assert "images" not in said("inference.urls=[http://localhost:1]"), "a model of text"
    (model / "preprocessor_config.json").write_text("{}")
    found = said("inference.urls=[http://localhost:1]")
    assert found.endswith(f"if started with {told}\n") if told else "images" not in found
    assert "images" not in said(), "the run starts them itself"


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
