"""Weights as a model's files have them: the same names, shapes and values as `save_pretrained` writes.

The reference is the file that transformers writes of the same model; a server reads such files.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from agentrl.models.auto_class import auto_class
from agentrl.train.export import saved_buffers
from agentrl.weights.file_names import FileWeight, file_buffers, file_weights, wrong_names
from agentrl.weights.file_publisher import WeightPublisher
from agentrl.weights.gather import full_tensor
from tests.models.families import FAMILIES, small_config_with_images, small_model
from tests.models.ways import WAYS_WITH_IMAGES

CONVERTED = {  # families whose files have other tensors than the model, and one of these in the files
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.2.down_proj.weight",
    "hrm_text": None,
    "deepseek_v3": "model.layers.1.mlp.experts.0.gate_proj.weight",
}
AS_THEY_ARE = ("llama", "gpt2", "gemma2", "mamba2", "apertus")  # the last has buffers


def loaded(name: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A family's model as it is loaded from its files, and these files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = small_model(name)
        made.save_pretrained(folder)
        model = auto_class(made.config).from_pretrained(folder, dtype=torch.float32)
        model.save_pretrained(folder / "saved")  # a class may have changed the padding token's row when it was loaded
    return model, load_file(folder / "saved" / "model.safetensors")


def check_family(name: str, folder: Path) -> None:
    model, files = loaded(name, folder)
    sent = file_weights(model, model.named_parameters())
    assert len(sent) == len(dict(sent))
    assert wrong_names(sent, folder, model.base_model_prefix) is None
    for given, weight in sent:
        value = full_tensor(weight)
        assert weight.shape == value.shape and torch.equal(value, files[given]), given
        if isinstance(weight, FileWeight) and weight.cut is not None:
            assert torch.equal(weight.cut.of(weight.cut.weight), value), given
    beside = file_buffers(model, saved_buffers(model), folder)
    assert set(beside) == set(files) - set(dict(sent)), "the whole of the files is sent"
    assert all(torch.equal(beside[one], files[one]) for one in beside)


@pytest.mark.parametrize("name", [*CONVERTED, *AS_THEY_ARE, "sarvam_moe"])  # the last has a buffer that is renamed
def test_weights_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*FAMILIES, *WAYS_WITH_IMAGES} - {*CONVERTED, *AS_THEY_ARE}))
def test_weights_of_every_family_are_those_of_its_files(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


@pytest.mark.parametrize("name", CONVERTED)
def test_experts_stand_one_by_one(name: str, tmp_path: Path) -> None:
    model, _ = loaded(name, tmp_path)
    sent = dict(file_weights(model, model.named_parameters()))
    assert any(isinstance(weight, FileWeight) for weight in sent.values())
    assert CONVERTED[name] is None or CONVERTED[name] in sent


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_what_stands_in_the_files_as_it_is_is_passed_on(name: str) -> None:
    model = small_model(name)
    named = list(model.named_parameters())
    assert all(one is other for (_, one), (_, other) in zip(file_weights(model, named), named, strict=True))


@pytest.mark.parametrize(("first", "then"), [(0, 2), (1, 3), (2, 0), (5, 0), (1, 1)])
def test_a_tensor_that_does_not_follow_the_one_before_is_made_anew(tmp_path: Path, first: int, then: int) -> None:
    """As samples of a version are taken, before the next version is sent from the beginning."""
    model, _ = loaded("qwen3_moe", tmp_path)
    sent = file_weights(model, model.named_parameters())
    experts = [(name, weight) for name, weight in sent if ".layers.0.mlp.experts." in name and "down" not in name]
    full_tensor(experts[first][1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(tmp_path / "again")
    name, weight = experts[then]
    assert torch.equal(full_tensor(weight), load_file(tmp_path / "again" / "model.safetensors")[name])


def test_a_published_file_is_one_that_transformers_reads(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_moe", tmp_path)
    publisher = WeightPublisher(
        file_weights(model, model.named_parameters()), torch.float32, "disk", tmp_path / "run", is_writer=True
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    manifest = publisher.write(1)
    assert manifest is not None
    assert not any(".experts." in name for name in manifest.samples), "a server cannot be asked for one expert of many"
    (Path(manifest.path) / "config.json").write_text((tmp_path / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(manifest.path, dtype=torch.float32)
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    publisher.close()


def test_the_text_side_of_a_model_is_sent_under_the_names_of_the_whole(tmp_path: Path) -> None:
    """transformers loads the text part of such a folder alone; a server holds the whole model."""
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(small_config_with_images("qwen3_5"), dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not any("visual" in name for name, _ in model.named_parameters())
    sent = file_weights(model, model.named_parameters())
    assert wrong_names(sent, tmp_path, model.base_model_prefix) is None
    assert any(".language_model." in name for name, _ in sent)
    for name, weight in sent:
        assert torch.equal(full_tensor(weight), files[name]), name


def test_names_that_the_files_lack_are_found(tmp_path: Path) -> None:
    model, files = loaded("qwen3_moe", tmp_path)
    named = list(model.named_parameters())
    wrong = wrong_names(named, tmp_path, model.base_model_prefix)
    assert wrong is not None and "experts.gate_up_proj" in wrong and "which the files lack" in wrong
    name = "model.norm.weight"
    save_file({**files, name: torch.zeros(7)}, tmp_path / "model.safetensors")
    sent = file_weights(model, named)
    wrong = wrong_names(sent, tmp_path, model.base_model_prefix)
    assert wrong is not None and wrong == "model.norm.weight [32], which is [7] in the files"
    save_file({name.removeprefix("model."): one for name, one in files.items()}, tmp_path / "model.safetensors")
    assert wrong_names(sent, tmp_path, model.base_model_prefix) is None, "files may leave out the decoder's name"
    assert wrong_names(sent, tmp_path / "run", "model") is None, "there is nothing to compare with"
