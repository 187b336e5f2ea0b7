"""A model whose files are broken, or do not belong together, is refused in one line, not loaded with random weights."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.core.model_files import Unreadable, read_config, read_tokenizer
from agentrl.engine.model import ModelError, load_without_tokenizer
from agentrl.models.folder_check import refused_folder
from agentrl.models.loading import load_weights
from agentrl.train.policy import ModelRefused, load_model, read_model

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
