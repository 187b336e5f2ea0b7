"""A run stands for its model: the exported one, or that of a checkpoint, which is written once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.errors import ConfigError, UserError
from agentrl.config.load import load_recipe
from agentrl.launch.model_of_run import model_of_run
from agentrl.train.checkpoint_model import write_model
from tests.train.saved import save_whole
from tests.train.toy_policy import make_engine


def test_the_model_of_a_checkpoint_has_its_parameters(tiny_model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    engine = make_engine(tiny_model, {"learning_rate": 1e-3})
    with torch.no_grad():
        for parameter in engine.policy.parameters():
            parameter.add_(0.25)
    checkpoint = save_whole(tmp_path / "checkpoints", 7, engine, {})
    expected = {name: one.detach().clone() for name, one in engine.policy.model.state_dict().items()}
    write_model(checkpoint, tiny_model, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found and all(torch.equal(one, expected[name].to(one.dtype)) for name, one in found.items())
    assert json.loads((tmp_path / "out" / "agentrl.json").read_text()) == {"step": 7}
    assert (tmp_path / "out" / "tokenizer_config.json").is_file() and not list(tmp_path.glob(".partial*"))
    larger = tmp_path / "larger"
    shutil.copytree(tiny_model, larger)
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(UserError, match="does not hold the whole model"):
        write_model(checkpoint, larger, tmp_path / "wrong")
    recipe = load_recipe("arithmetic_grpo", [f"model.name={tiny_model}"])
    (tmp_path / "config.json").write_text(recipe.model_dump_json())
    written = Path(model_of_run(str(tmp_path)))
    assert written == tmp_path / "model-step-000007" == Path(model_of_run(str(checkpoint)))
    assert load_file(written / "model.safetensors").keys() == found.keys()
    shutil.copytree(tmp_path / "out", tmp_path / "model")
    assert model_of_run(str(tmp_path)) == str(tmp_path / "model"), "it is of the same step"


def test_what_is_no_run_is_returned_and_a_run_without_a_model_refused(tmp_path: Path) -> None:
    assert model_of_run("some/name") == "some/name" and model_of_run(str(tmp_path)) == str(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="without a model and without a checkpoint"):
        model_of_run(str(tmp_path))
