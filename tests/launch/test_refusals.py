"""What the user gave wrong is found while the servers load, and ends the run in one line with exit code 2."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.host.entry import REFUSED, refusal_in, refuse
from agentrl.launch import run as run_module
from agentrl.launch.controller_process import serve
from agentrl.launch.servers import find_model
from agentrl.launch.supervisor import ChildRefused
from agentrl.models.folder_check import tokens_without_row


def changed(model: Path, folder: Path, **config: Any) -> Path:
    """A copy of a model's folder with other values in its config."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder


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


async def test_a_tokenizer_with_ids_that_the_embedding_lacks_is_refused_before_there_are_servers(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_model, tmp_path / "few", vocab_size=100)
    with pytest.raises(UserError, match=r"tokens \(e\.g\. .*\) beyond the 100 rows.*resize_token_embeddings"):
        await controller(tmp_path / "x", folder)


async def test_special_tokens_without_a_row_are_refused_only_in_a_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """As those of images in the tokenizers of text models."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = max(tokenizer.get_vocab().values()) + 1
    folder = changed(tiny_model, tmp_path / "image", vocab_size=rows)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokens_without_row(tokenizer, rows) == ([], ["<image>"])
    tokenizer.chat_template = tokenizer.chat_template.replace("{%", "<image>{%", 1)
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=rf"the first prompt holds '<image>' \(id {rows}\).*{rows} rows"):
        await controller(tmp_path / "x", folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\).*dequantize"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_a_model_that_no_trainer_can_train_is_refused_before_a_process_starts(
    config: dict[str, Any], said: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_model, tmp_path / "model", **config)
    settings = [f"model.name={folder}", f"launch.run_dir={tmp_path / 'runs'}", "name=x"]
    recipe = load_recipe("arithmetic_grpo", settings, device="cpu")
    with pytest.raises(run_module.RunError, match=said):
        run_module.run_recipe(recipe, resume=False, console=Console(file=io.StringIO()))
    assert not (tmp_path / "runs" / "x").exists()


def test_a_base_model_needs_a_template_from_somewhere(tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path / "base")
    for file in folder.glob("chat_template*"):
        file.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    console = Console(file=io.StringIO())
    with pytest.raises(UserError, match=r"no chat template.*model\.chat_template=chatml_tools"):
        find_model(load_recipe("arithmetic_grpo", [f"model.name={folder}"], device="cpu"), console)
    given = [f"model.name={folder}", "model.chat_template=chatml_tools"]
    assert find_model(load_recipe("arithmetic_grpo", given, device="cpu"), console).path == folder.resolve()


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
