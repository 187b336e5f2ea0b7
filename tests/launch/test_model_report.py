"""`agentrl model check`: what is said of good models, and of folders in which something is wrong."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.launch.model_report import Line, _memory, as_json, report, shown
from tests.models.families import small_model
from tests.tiny_mixture import build_tiny_mixture
from tests.tiny_vision import build_tiny_vision


def edited(folder: Path, target: Path, name: str = "config.json", **values: Any) -> Path:
    """Copies a model folder and changes one of its JSON files."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    content = json.loads((target / name).read_text()) | values
    (target / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return target


def with_tokenizer(family: str, folder: Path, tiny_model: Path) -> Path:
    """A family's miniature with the tokenizer of the tiny model, whose ids do not all fit its embedding."""
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    small_model(family).save_pretrained(folder)
    return folder


def said(lines: list[Line], part: str) -> Line:
    (found,) = [line for line in lines if line.part == part]
    return found


def test_a_plain_model_is_fine_in_all_parts(tiny_model: Path) -> None:
    lines = report(tiny_model)
    found = json.loads(as_json("tiny", lines))
    assert (found["train"], found["engine"], found["model"]) == ("trees", "trees", "tiny")
    assert found["logprob_gap"]["float32"] < 1e-4 and found["logprob_gap"]["bfloat16"] < 0.1
    assert found["head"] == "linear" and "q_proj" in found["lora"]
    assert [line["part"] for line in found["lines"] if line["verdict"] == "refused"] == []
    table = shown(lines)
    assert all(line.part in table for line in lines)


def test_a_state_space_model_is_slower_and_says_why(tiny_model: Path, tmp_path: Path) -> None:
    lines = report(with_tokenizer("mamba2", tmp_path, tiny_model))
    trainer, engine = said(lines, "trainer"), said(lines, "embedded engine")
    assert (trainer.verdict, engine.verdict) == ("slower", "slower")
    assert "padded" in trainer.text and "because" in trainer.text and "caches" in engine.text and engine.remedy
    assert (trainer.data["train"], engine.data["engine"]) == ("padded", "padded")
    assert list(trainer.data["logprob_gap"]) == ["float32"] and "does not compute in bfloat16" in trainer.text
    vocabulary = said(lines, "vocabulary")
    assert vocabulary.verdict == "refused" and "resize_token_embeddings" in vocabulary.remedy


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"model_type": "of_next_year"}, "does not know the model type 'of_next_year'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "trust_remote_code"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_with_what_to_do(
    config: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    lines = report(edited(tiny_model, tmp_path, **config))
    for part in ("trainer", "embedded engine"):
        line = said(lines, part)
        assert line.verdict == "refused" and line.remedy
        assert re.search(message, f"{line.text}: {line.remedy}"), line
    found = json.loads(as_json("tiny", lines))
    assert (found["train"], found["engine"], found["logprob_gap"]) == ("refused", "refused", {})


def test_a_folder_without_weights_or_with_some_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = edited(tiny_model, tmp_path / "none")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert "no weights" in said(report(folder), "trainer").text
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert "lacks model-00002-of-00002.safetensors" in said(report(folder), "embedded engine").text


def test_a_missing_template_pad_token_or_tokenizer_is_said(tiny_model: Path, tmp_path: Path) -> None:
    folder = edited(tiny_model, tmp_path / "bare", "tokenizer_config.json", chat_template=None, pad_token=None)
    for file in folder.glob("chat_template*"):
        file.unlink()
    lines = report(folder)
    template = said(lines, "chat template")
    assert template.verdict == "refused" and "model.chat_template=chatml_tools" in template.remedy
    assert "none is needed" in said(lines, "end tokens").text
    assert said(lines, "trainer").verdict == "ok"
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert said(report(folder), "tokenizer").verdict == "refused"


def test_weights_that_the_config_does_not_ask_for_are_refused_with_their_own_remedy(
    tiny_model: Path, tmp_path: Path
) -> None:
    lines = report(edited(tiny_model, tmp_path, num_hidden_layers=3))
    for part in ("trainer", "embedded engine"):
        line = said(lines, part)
        assert line.verdict == "refused" and "lacks weights" in line.text and "config.json" in line.remedy


def test_a_number_that_is_none_stands_in_no_json(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may overflow in bfloat16."""

    def gap(model: Any, trial: Any, device: Any, dtype: torch.dtype) -> float:
        return 0.0 if dtype == torch.float32 else math.nan

    monkeypatch.setattr("agentrl.train.probe_report._gap", gap)
    lines = report(tiny_model)
    trainer = said(lines, "trainer")
    assert trainer.verdict == "slower" and "set trainer.dtype=float32" in trainer.text
    assert json.loads(as_json("tiny", lines))["logprob_gap"] == {"float32": 0.0}


def test_all_end_tokens_are_found(tiny_model: Path, tmp_path: Path) -> None:
    folder = edited(tiny_model, tmp_path, eos_token_id=[5, 7])
    ends = said(report(folder), "end tokens").data["end_tokens"]
    assert {5, 7} <= set(ends) and len(ends) == len(set(ends))


def test_a_large_model_is_tried_by_a_small_one_of_its_config(tiny_model: Path, tmp_path: Path) -> None:
    folder = edited(tiny_model, tmp_path)
    large = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14336)
    large.save_pretrained(folder)
    line = said(report(folder), "trainer")
    assert line.data["train"] == "trees" and "a small random model of its config" in line.text


def test_the_command_ends_with_1_where_a_part_refuses(tiny_model: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["model", "check", str(tiny_model), "--json"])
    assert good.exit_code == 0 and json.loads(good.stdout)["train"] == "trees", "stdout is the object alone"
    folder = edited(tiny_model, tmp_path, is_encoder_decoder=True)
    bad = runner.invoke(app, ["model", "check", str(folder)])
    assert bad.exit_code == 1 and "encoder-decoder" in bad.stdout


def test_a_model_that_takes_images_says_what_stands_for_them(tiny_vision: Path) -> None:
    lines = report(tiny_vision)
    line, found = said(lines, "images"), json.loads(as_json("tiny", lines))
    assert line.verdict == "ok" and "logits of its own forward pass" in line.text
    assert found["images"] == "ok"
    token = AutoTokenizer.from_pretrained(tiny_vision).convert_ids_to_tokens(found["placeholder"])
    assert re.search(rf"Processor puts \d+ times '{re.escape(token)}' \({found['placeholder']}\)", line.text), line.text
    assert ("which vLLM does not take" in line.text) == ("idefics" in str(tiny_vision))
    assert line.part in shown(lines)
    assert not [target for target in found["lora"] if "visual" in target or "vision" in target]


@pytest.mark.parametrize("family", ["phi", "qwen2_moe", "gpt2"])
def test_memory_is_of_all_parameters_whatever_the_layers_are(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    model.save_pretrained(tmp_path)
    (line,) = _memory(tmp_path, False)
    assert line.data == {"parameters": sum(one.numel() for one in model.parameters())}


def test_memory_is_of_an_image_tower_too_where_one_is_loaded(tiny_vision: Path) -> None:
    (line,) = _memory(tiny_vision, False)
    model = AutoModelForImageTextToText.from_pretrained(tiny_vision)
    assert line.data == {"parameters": sum(one.numel() for one in model.parameters())}


def test_a_text_model_says_that_it_takes_no_images(tiny_model: Path) -> None:
    line = said(report(tiny_model), "images")
    assert (line.verdict, line.data["images"]) == ("ok", "none")


def test_a_template_that_leaves_images_out_is_said(tmp_path: Path) -> None:
    folder = build_tiny_vision(tmp_path / "model")
    for file in folder.glob("chat_template*"):
        file.unlink()
    text = "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['content'] is string %}{{ m['content'] }}{% endif %}"
    other = edited(folder, tmp_path / "other", "tokenizer_config.json", chat_template=text + "{% endfor %}")
    line = said(report(other), "images")
    assert line.verdict == "refused" and "the chat template renders none" in line.text and line.remedy


def test_an_engine_or_a_trainer_that_takes_no_images_is_named(
    tiny_vision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engine.cache_support.wrong_image_cache", lambda model: "forgets images")
    monkeypatch.setattr("agentrl.train.probe_report.wrong_image_rows", lambda model: "rows get mixed up")
    line = said(report(tiny_vision), "images")
    assert line.verdict == "refused"
    assert "the embedded engine takes none" in line.text and "forgets images" in line.text
    assert "the trainer takes none: rows get mixed up" in line.text


def test_a_mixture_says_what_can_be_replayed(tmp_path: Path, tiny_model: Path) -> None:
    lines = report(build_tiny_mixture(tmp_path))
    line, adapted = said(lines, "routing"), said(lines, "LoRA targets")
    assert adapted.verdict == "slower" and "none for the experts' stacked weights, " in adapted.text and adapted.remedy
    assert said(report(tiny_model), "LoRA targets").verdict == "ok"
    assert line.data == {"replay_routing": True} and "2 routers choose 2 of 4 experts" in line.text
    assert said(report(tiny_model), "routing").data == {"replay_routing": False}
