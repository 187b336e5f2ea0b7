"""What the user gave wrong is found while the servers load, and ends the run in one line with exit code 2."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.host.entry import REFUSED, refusal_in, refuse
from agentrl.launch import run as run_module
from agentrl.launch.controller_process import serve
from agentrl.launch.supervisor import ChildRefused


async def controller(folder: Path, model: Path, *settings: str) -> None:
    """Run the controller of a run whose servers never come."""
    (folder / "processes").mkdir(parents=True)
    recipe = load_recipe("arithmetic_grpo", [f"model.name={model}", *settings], device="cpu")
    await serve(recipe, folder, model, folder / "no.json", folder / "ready.json", resume=False)


async def test_validation_tasks_that_cannot_be_read_are_refused_before_there_are_servers(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"nothing\.jsonl"):
        await controller(tmp_path / "x", tiny_model, f"valid_dataset.name={tmp_path}/nothing.jsonl")


async def test_prompts_that_do_not_fit_are_refused_before_there_are_servers(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not fit inference\.context_length=20, nor does that of 7 other tasks"):
        await controller(tmp_path / "x", tiny_model, "inference.context_length=20")


async def test_a_tokenizer_without_an_end_is_refused_before_there_are_servers(tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        await controller(tmp_path / "x", bare)


def test_a_refusal_is_read_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse(UserError("no file x.jsonl")) == REFUSED
    assert refusal_in("refused: an older one\n" + capsys.readouterr().err) == "no file x.jsonl"


@pytest.mark.parametrize("resume", [False, True])
def test_a_refused_run_leaves_its_name_free_but_a_resumed_one_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    recipe = load_recipe("arithmetic_grpo", [f"launch.run_dir={tmp_path}", "name=x"], device="cpu")

    def refused(*args: object, **more: object) -> int:
        (tmp_path / "x" / "logs").mkdir()
        raise ChildRefused("no file x.jsonl")

    monkeypatch.setattr(run_module, "check_components", lambda recipe: None)
    monkeypatch.setattr(run_module, "check_resumable", lambda recipe, run_dir: None)
    monkeypatch.setattr(run_module, "train_recipe", refused)
    if resume:
        (tmp_path / "x").mkdir()
    with pytest.raises(run_module.RunError, match=r"^no file x\.jsonl$"):
        run_module.run_recipe(recipe, resume=resume, console=Console(file=io.StringIO()))
    assert (tmp_path / "x").exists() == resume
