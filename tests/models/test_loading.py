"""A model whose files are broken, or do not belong together, is refused in one line, not loaded with random weights."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.core.model_files import Unreadable, end_ids, read_config, read_tokenizer
from agentrl.core.template_marks import TemplateError
from agentrl.engine.model import ModelError, load_without_tokenizer
from agentrl.inference.template import ChatTemplate
from agentrl.launch.model_report import report
from agentrl.models.folder_check import refused_folder
from agentrl.models.loading import load_weights
from agentrl.train.policy import ModelRefused, load_model, read_model
from tests.models.families import small_model
from tests.tiny_mixture import build_tiny_mixture

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def with_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def without_weight(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def stored(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Writes each weight of a folder as ``change`` of its name and values gives it."""
    weights = {name: change(name, one) for name, one in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def as_matrices(folder: Path, dtype: torch.dtype) -> None:
    stored(folder, lambda _, one: one.to(dtype) if one.ndim == 2 else one)


def as_adapter(folder: Path, text: str) -> None:
    (folder / "adapter_config.json").write_text(text)
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")


def cut(folder: Path, size: int) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def in_parts(folder: Path, index: str) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(index)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pointer": (lambda one: (one / WEIGHTS).write_text(POINTER), r"model\.safetensors is the pointer of Git LFS"),
    "cut": (lambda one: cut(one, 50_000), r"has 50000 bytes of \d+: download"),
    "cut in its head": (lambda one: cut(one, 100), "is cut, or no safetensors file"),
    "empty": (lambda one: cut(one, 0), "is cut, or no safetensors file"),
    "no index": (lambda one: (one / WEIGHTS).rename(one / "model-00001-of-00002.safetensors"), f"nor {INDEX}"),
    "an index that is no JSON": (lambda one: in_parts(one, "{"), "is no index of weights"),
    "an index of nothing": (lambda one: in_parts(one, "[]"), "is no index of weights"),
    "an index of another file": (lambda one: in_parts(one, '{"weight_map": {"a": "b.safetensors"}}'), "lacks b.safe"),
    "a config that is no object": (lambda one: (one / "config.json").write_text("[]"), "holds no JSON object"),
    "quantised text": (
        lambda one: with_config(one, text_config={"quantization_config": {"quant_method": "awq"}}),
        r"quantised \(awq\)",
    ),
    "stored in FP8": (lambda one: as_matrices(one, torch.float8_e4m3fn), r"quantised \(F8_E4M3, e\.g\. .*dequantize"),
    "stored in INT8": (lambda one: as_matrices(one, torch.int8), r"quantised \(I8"),
    "an adapter": (lambda one: as_adapter(one, '{"base_model_name_or_path": "org/base"}'), "of org/base: merge it"),
    "an odd adapter": (lambda one: as_adapter(one, "[]"), r"an adapter \(LoRA\): merge it"),
    "an adapter alone": (
        lambda one: [as_adapter(one, "{}"), (one / "config.json").unlink()],
        r"no model folder: it holds an adapter",
    ),
    "an adapter beside a model": (
        lambda one: (one / "adapter_config.json").write_text("{}"),
        r"no model by itself: it holds an adapter",
    ),
    "a GGUF": (lambda one: (one / WEIGHTS).rename(one / "model.gguf"), "a GGUF, which cannot be trained"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_before_its_weights_are_read(name: str, folder: Path) -> None:
    assert refused_folder(folder) is None
    edit, words = BROKEN[name]
    edit(folder)
    why = refused_folder(folder) or ""
    assert re.search(words, why), why
    assert "\n" not in why


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight that is missing": (without_weight, r"lacks weights .*layers\.1\.mlp\.down_proj"),
    "more layers": (lambda one: with_config(one, num_hidden_layers=4), r"lacks weights .* and \d+ more"),
    "another size": (lambda one: with_config(one, vocab_size=300), r"as \[267, 32\], and its config.json wants \[300"),
    "heads that do not fit": (lambda one: with_config(one, num_attention_heads=5), "not a multiple"),
    "an unknown rotation": (lambda one: with_config(one, rope_scaling={"type": "warp"}), "KeyError: 'warp'"),
    "an encoder-decoder": (lambda one: with_config(one, model_type="t5"), "no causal language model of a 't5'"),
    "no model type": (lambda one: with_config(one, model_type=None), "names no model_type"),
    "NaN": (
        lambda one: stored(one, lambda name, values: values * math.nan if "up_proj" in name else values),
        "hold NaN or infinity: its weights are damaged",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_trainer_and_engine_refuse_what_would_be_loaded_wrongly(name: str, folder: Path) -> None:
    edit, words = ODD[name]
    edit(folder)
    for load, refused in (
        (lambda: load_model(folder), ModelRefused),
        (lambda: load_without_tokenizer(str(folder), "float32", "cpu", 64), ModelError),
    ):
        with pytest.raises(refused, match=words) as found:
            load()
        assert "\n" not in str(found.value)


def test_weights_that_the_caller_sets_may_be_missing(folder: Path) -> None:
    without_weight(folder)
    config = read_config(folder)
    assert load_weights(AutoModelForCausalLM, folder, config, drawn=["model.layers.1"])
    with pytest.raises(Unreadable, match=r"down_proj"):
        load_weights(AutoModelForCausalLM, folder, config, drawn=["model.layers.0"])


def test_adapters_may_be_missing_and_nothing_else(folder: Path) -> None:
    """Ranks that load their own parts have adapters already, whose values are not in the files."""
    names = {r"\.q_proj\.weight$": ".q_proj.weight"}
    assert read_model(folder, key_mapping=names)
    without_weight(folder)
    with pytest.raises(ModelRefused, match="lacks weights"):
        read_model(folder, key_mapping=names)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_refused_in_one_line(name: str, folder: Path) -> None:
    (folder / name).write_text(POINTER)
    with pytest.raises(Unreadable, match=r"cannot be loaded .*: copy the model's own tokenizer\.json") as found:
        read_tokenizer(folder)
    assert "\n" not in str(found.value)


def test_a_mixture_that_chooses_more_experts_than_it_has_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_mixture(tmp_path / "model")
    with_config(folder, num_experts_per_tok=9)
    with pytest.raises(ModelRefused, match="out of range"):
        load_model(folder)
    with pytest.raises(ModelError, match=r"cannot compute a sequence .*out of range"):
        load_without_tokenizer(str(folder), "float32", "cpu", 64)


@pytest.mark.parametrize("ends", ["266", 266.0, [[266]], -1, True])
def test_end_tokens_that_are_no_ids_are_refused(ends: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(
        ModelError, match=r"eos_token_id of generation_config\.json is .*, neither a token's id nor a list"
    ):
        load_without_tokenizer(str(folder), "float32", "cpu", 64)
    with pytest.raises(TemplateError, match=r"generation_config\.json is .*, neither"):
        ChatTemplate.from_folder(folder)
    line = next(one for one in report(folder) if one.part == "end tokens")
    assert line.verdict == "refused" and "neither" in line.text and line.remedy


def test_end_tokens_are_one_id_several_or_none(folder: Path) -> None:
    for given, expected in ((5, [5]), ([5, 7], [5, 7]), (None, []), ([], [])):
        assert end_ids(given, "a file") == expected


def test_a_head_that_multiplies_by_nothing_is_refused(tmp_path: Path) -> None:
    small_model("cohere").save_pretrained(tmp_path)
    with_config(tmp_path, logit_scale=0.0)
    with pytest.raises(ModelRefused, match="multiplies the logits by 0"):
        load_model(tmp_path)
