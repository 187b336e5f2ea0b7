"""Code that comes with a model runs only where `model.trust_remote_code` says so, in trainer, engine and check."""

import contextlib
import json
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh
from transformers import dynamic_module_utils

from agentrl.core.image_reader import ImageReader
from agentrl.core.model_files import read_config
from agentrl.core.template_marks import TemplateError
from agentrl.engine.model import ModelError, load_without_tokenizer
from agentrl.inference.local_tokenizer import local_tokenizer
from agentrl.inference.template import ChatTemplate
from agentrl.inference.template_source import template_text
from agentrl.launch.model_report import report
from agentrl.train.model_check import small_model
from agentrl.train.policy import ModelRefused, load_model
from tests.tiny import build_tiny_model

CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path({ran!r}).touch()


class BroughtConfig(LlamaConfig):
    model_type = "brought"


class BroughtForCausalLM(LlamaForCausalLM):
    config_class = BroughtConfig
"""

TOKENIZER = """

from transformers import PreTrainedTokenizerFast


class BroughtTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model with code of its own, and a file that is there once the code has run."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, ran = build_tiny_model(tmp_path / f"model{abs(hash(tmp_path))}"), tmp_path / "ran"
    (folder / "brought.py").write_text(CODE.format(ran=str(ran)))
    config = json.loads((folder / "config.json").read_text())
    brings = {"AutoConfig": "brought.BroughtConfig", "AutoModelForCausalLM": "brought.BroughtForCausalLM"}
    config |= {"model_type": "brought", "architectures": ["BroughtForCausalLM"], "auto_map": brings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, ran


def test_without_the_key_no_part_runs_it_and_the_key_is_named(brought: tuple[Path, Path], mesh: DeviceMesh) -> None:
    folder, ran = brought
    with pytest.raises(ModelRefused, match=r"set model\.trust_remote_code=true .* if you trust it"):
        load_model(folder)
    with pytest.raises(ModelError, match=r"set model\.trust_remote_code=true"):
        load_without_tokenizer(str(folder), "float32", "cpu", 64)
    lines = {line.part: line for line in report(folder)}
    assert lines["trainer"].verdict == lines["embedded engine"].verdict == "refused"
    assert "model.trust_remote_code=true" in lines["trainer"].remedy
    assert not ran.exists()


def test_no_process_asks_at_the_terminal(brought: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks whether code may run where it is not told, and runs it after a yes."""
    folder, ran = brought
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "processor_config.json").write_text("{}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": None}))
    for read in (ChatTemplate.from_folder, ImageReader.find, lambda one: template_text("training", one), report):
        with contextlib.suppress(TemplateError):
            read(folder)
    assert local_tokenizer(folder, {"model": {"name": str(folder)}})
    assert not ran.exists()


def test_with_the_key_trainer_and_engine_run_it(brought: tuple[Path, Path], mesh: DeviceMesh) -> None:
    folder, ran = brought
    assert type(load_model(folder, trust=True)).__name__ == "BroughtForCausalLM" and ran.exists()
    served = load_without_tokenizer(str(folder), "float32", "cpu", 64, trust=True)
    assert type(served.model).__name__ == "BroughtForCausalLM"


def test_a_tokenizer_of_its_own_needs_the_key_and_works_with_it(brought: tuple[Path, Path]) -> None:
    folder, ran = brought
    (folder / "brought.py").write_text(CODE.format(ran=str(ran)) + TOKENIZER)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "BroughtTokenizer",
        "auto_map": {"AutoTokenizer": [None, "brought.BroughtTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TemplateError, match=r"set model\.trust_remote_code=true"):
        ChatTemplate.from_folder(folder)
    assert not ran.exists()
    template = ChatTemplate.from_folder(folder, trust=True)
    assert type(template.tokenizer).__name__ == "BroughtTokenizer" and ran.exists()


def test_the_small_model_of_the_check_has_the_class_that_was_trusted(brought: tuple[Path, Path]) -> None:
    model = small_model(read_config(brought[0], trust=True))
    assert type(model).__name__ == "BroughtForCausalLM"
