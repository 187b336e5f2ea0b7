"""What is settled before a run's processes start."""

import errno
import io
import json
import shutil
import socket
import subprocess
import sys
import types
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.host.process import write_json
from agentrl.launch import commands
from agentrl.launch import run as run_module
from agentrl.launch.live_watch import LiveWatch
from agentrl.launch.resolve import resolve
from agentrl.launch.results import ExitReason, RunStopped
from agentrl.launch.run import RunError, claim_run_dir
from agentrl.launch.run_checks import check_components, check_disk
from agentrl.launch.run_owner import RunOwned
from agentrl.launch.supervisor import ChildRefused, Supervisor
from tests.train.noisy_models import write_model


def recipe(runs: Path, *overrides: str):
    return load_recipe("arithmetic_grpo", [f"launch.run_dir={runs}", "name=x", *overrides], device="cpu")


def test_a_name_that_was_chosen_and_is_taken_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    claim_run_dir(recipe(tmp_path), resume=False, numbered=False)
    with pytest.raises(RunError, match=r"--resume.*name=NEW"):
        claim_run_dir(recipe(tmp_path), resume=False, numbered=False)


def test_a_name_of_our_own_gets_a_number_and_the_recipe_knows_it(tmp_path: Path) -> None:
    names = [claim_run_dir(recipe(tmp_path), resume=False, numbered=True)[0].name for _ in range(3)]
    assert names == ["x", "x-2", "x-3"]
    assert all((tmp_path / name).is_dir() for name in names)


def exported(run_dir: Path, step: int) -> None:
    """The model of a step."""
    (run_dir / "model").mkdir(exist_ok=True)
    (run_dir / "model" / "agentrl.json").write_text(json.dumps({"step": step}))


def test_a_run_that_was_killed_before_its_export_is_resumed_to_write_it(tmp_path: Path) -> None:
    whole = tmp_path / "x" / "checkpoints" / "step-000005"
    whole.mkdir(parents=True)
    (whole / "state.json").write_text(json.dumps({"step": 5}))
    over = recipe(tmp_path, "trainer.total_steps=5")
    claim_run_dir(over, resume=True, numbered=False)
    exported(tmp_path / "x", 3)  # of the run before it was resumed with more steps
    claim_run_dir(over, resume=True, numbered=False)
    exported(tmp_path / "x", 5)
    with pytest.raises(RunError, match="has made all its 5 steps"):
        claim_run_dir(over, resume=True, numbered=False)


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the folder; 48 draws were trained twice when a second run could start."""
    monkeypatch.setattr(run_module, "check_components", lambda recipe: None)
    holder = hold(claim_run_dir(recipe(tmp_path), resume=False, numbered=False)[1])
    try:
        with pytest.raises(RunOwned, match=rf"run 'x' is still going: process {holder.pid} on {socket.gethostname()}"):
            run_module.run_recipe(recipe(tmp_path), resume=True, console=Console(file=io.StringIO()))
    finally:
        holder.kill()
        holder.communicate()
    with pytest.raises(RunError, match="no complete checkpoint"):  # the lock has died with its process
        run_module.run_recipe(recipe(tmp_path), resume=True, console=Console(file=io.StringIO()))


def hold(run_dir: Path) -> "subprocess.Popen[str]":
    """A process that holds a run's folder until it is killed."""
    code = (
        "import sys; from pathlib import Path; from agentrl.launch.run_owner import RunOwner\n"
        "with RunOwner(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_full_disk_costs_the_picture_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "metrics.jsonl").write_text("{}")
    monkeypatch.setattr(run_module, "draw_curve", full)
    console = Console(file=io.StringIO(), width=200)
    run_module._draw(recipe(tmp_path), tmp_path, console)
    assert "reward.png could not be written: No space left" in console.file.getvalue()  # type: ignore[attr-defined]


def test_resuming_needs_a_checkpoint_and_steps_left(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no complete checkpoint"):
        claim_run_dir(recipe(tmp_path), resume=True, numbered=False)
    partial = tmp_path / "x" / "checkpoints" / ".partial-step-000005"
    partial.mkdir(parents=True)
    with pytest.raises(RunError, match="no complete checkpoint"):
        claim_run_dir(recipe(tmp_path), resume=True, numbered=False)
    whole = tmp_path / "x" / "checkpoints" / "step-000005"
    whole.mkdir()
    (whole / "state.json").write_text(json.dumps({"step": 5, "spent_budget": None}))
    assert claim_run_dir(recipe(tmp_path), resume=True, numbered=False)[1] == tmp_path / "x"
    exported(tmp_path / "x", 5)
    with pytest.raises(RunError, match=r"has made all its 5 steps.*trainer\.total_steps"):
        claim_run_dir(recipe(tmp_path, "trainer.total_steps=5"), resume=True, numbered=False)
    (whole / "state.json").write_text(json.dumps({"step": 5, "controller": {"epochs": 2}}))
    claim_run_dir(recipe(tmp_path, "trainer.epochs=3"), resume=True, numbered=False)
    with pytest.raises(RunError, match=r"has made all its 2 epochs.*trainer\.epochs"):
        claim_run_dir(recipe(tmp_path, "trainer.epochs=2"), resume=True, numbered=False)


def test_a_stopped_run_says_how_to_continue_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "x" / "checkpoints" / "step-000005"
    whole.mkdir(parents=True)
    (whole / "state.json").write_text(json.dumps({"step": 5}))

    def stopped(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 5, "time": 1.0}\n')

    monkeypatch.setattr(run_module, "train_recipe", stopped)
    monkeypatch.setattr(run_module, "check_components", lambda recipe: None)
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(RunStopped) as caught:
        run_module.run_recipe(recipe(tmp_path), resume=True, console=console)
    assert caught.value.code == 130 and isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.result is not None and caught.value.result.model is None
    assert (caught.value.result.exit_reason, caught.value.result.steps) == (ExitReason.STOPPED, 5)
    assert f"agentrl runs resume x --run-dir {tmp_path}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_has_used_up_its_time_is_resumed_only_with_more(tmp_path: Path) -> None:
    """Else each resume would train one more step, as no step's length is known before it (verl 6232)."""
    whole = tmp_path / "x" / "checkpoints" / "step-000005"
    whole.mkdir(parents=True)
    (whole / "state.json").write_text(json.dumps({"step": 5, "elapsed": 498.0, "spent_budget": 505.0}))
    exported(tmp_path / "x", 5)
    for same in ("trainer.time_budget=505", "trainer.time_budget=300"):
        with pytest.raises(RunError, match=r"used up its 505 s in 5 steps.*trainer\.time_budget"):
            claim_run_dir(recipe(tmp_path, same), resume=True, numbered=False)
    for more in ("trainer.time_budget=900", "trainer.time_budget=null"):
        assert claim_run_dir(recipe(tmp_path, more), resume=True, numbered=False)[1] == tmp_path / "x"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot make .*launch\.run_dir"):
        claim_run_dir(recipe(tmp_path / "file" / "runs"), resume=False, numbered=False)


@pytest.mark.parametrize(("settings", "models"), [([], 1), (["trainer.advantage=gae"], 2)])
def test_a_disk_too_small_for_the_checkpoints_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], models: int
) -> None:
    """Two checkpoints of parameters and two moments in float32, whatever the files hold, and the export."""
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(10, 100, dtype=torch.bfloat16)}, file)
    needed = models * 2 * 12 * 1000 + file.stat().st_size
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100_000, 0, needed - 1))
    with pytest.raises(RunError, match=r"0\.0 GB free"):
        check_disk(recipe(tmp_path, *settings), tmp_path, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100_000, 0, needed))
    check_disk(recipe(tmp_path, *settings), tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("env.id=arithmetik", "did you mean 'arithmetic'"),
        ("env.id=no_such.py:Env", "no file"),
        ("env.kwargs.reward=1", r"env\.id=arithmetic with env\.kwargs=.*reward"),
        ("agent.id=chatt", "did you mean 'chat'"),
        ("workflow.id=no_such_module:W", "no_such_module"),
        ("inference.tool_parser=hermez", r"did you mean 'hermes'.*llama3_json"),
        ("inference.engine=vllm", r"neither this interpreter has it nor \.venv-vllm.*inference\.python=PATH"),
        ("model.chat_template=no_such.jinja", r"model\.chat_template=no_such\.jinja: no such file"),
    ],
)
def test_wrong_components_are_refused_before_the_run_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        check_components(recipe(tmp_path, setting))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "missing", "message"),
    [
        (
            "trainer.lora_rank=4",
            "agentrl.launch.needed_packages.find_spec",
            r"trainer\.lora_rank needs peft, not installed: pip install -e '\.\[lora\]'",
        ),
        ("trainer.compile=true", "agentrl.launch.run_checks._has_compiler", r"trainer\.compile needs a C\+\+ compiler"),
    ],
)
def test_what_a_choice_needs_and_is_not_there_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, missing: str, message: str
) -> None:
    monkeypatch.setattr(missing, lambda *names: None if names in ((), ("peft",)) else find_spec(*names))
    with pytest.raises(UserError, match=message):
        check_components(recipe(tmp_path, setting))


def test_the_controller_may_ask_the_hub_for_data(tmp_path, monkeypatch):
    """It loads the datasets: offline it would take generated problems where the real ones can be had."""
    given = {}

    class Stopped(Exception):
        pass

    class Recorder:
        def start(self, name, command, *, env=None, **more):
            given[name] = env
            if name == "trainer":
                raise Stopped
            return name

        def wait_ready(self, child, ready, timeout):
            return {"url": "http://127.0.0.1:1", "data": "some"}

        def check(self):
            pass

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    recipe = load_recipe("arithmetic_grpo", ["inference.urls=[http://127.0.0.1:1]"], device="cpu")
    view = types.SimpleNamespace(state=lambda text: None)
    with pytest.raises(Stopped):
        run_module._train(recipe, tmp_path, tmp_path, Recorder(), view, LiveWatch(tmp_path), resume=False)
    assert "HF_HUB_OFFLINE" not in given["controller"] and given["trainer"]["HF_HUB_OFFLINE"] == "1"


def test_a_model_that_cannot_be_trained_ends_the_run_while_its_servers_load(tmp_path):
    """The servers and the controller of this run would load forever, and no trainer starts."""

    class Loading(Supervisor):
        def start(self, name, command, **more):
            assert name != "trainer"
            if name == "model-check":
                return super().start(name, command, **more)
            return super().start(name, [sys.executable, "-c", "import threading; threading.Event().wait()"], **more)

    model, run_dir = write_model("gpt2", tmp_path / "model"), tmp_path / "run"
    chosen = resolve(recipe(tmp_path, "trainer.attention=packed", "inference.context_length=32"), None)
    supervisor = Loading(run_dir / "logs")
    write_json(run_dir / "config.json", chosen.model_dump(mode="json"))
    view = types.SimpleNamespace(state=lambda text: None)
    try:
        with pytest.raises(ChildRefused, match=r"^GPT2LMHeadModel cannot be"):
            run_module._train(chosen, model, run_dir, supervisor, view, LiveWatch(run_dir), resume=False)
    finally:
        supervisor.stop()


def test_torchrun_makes_its_folder_in_the_run(tmp_path: Path) -> None:
    """By default it makes torchelastic_* in the temporary folder, and leaves it there."""
    chosen = recipe(tmp_path)
    for command in (
        commands.trainer(chosen, tmp_path, tmp_path / "x", "http://c", False),
        commands.examples_trainer(chosen, tmp_path, tmp_path / "x", tmp_path / "ready", False),
    ):
        assert command[command.index("--log-dir") + 1] == str(tmp_path / "x" / "processes" / "torchrun-0")
