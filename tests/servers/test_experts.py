"""New weights of a mixture of experts reach real servers: each expert, by the name that it has in the model's files."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.config.recipe import Recipe
from agentrl.inference.backend import Backend
from agentrl.inference.kinds.kind import server_kind
from agentrl.launch.servers import start_servers
from agentrl.launch.supervisor import Supervisor
from agentrl.rollout.assemble import make_backend
from agentrl.weights.file_names import file_weights
from agentrl.weights.file_publisher import WeightPublisher
from tests.servers.conftest import HIDDEN, REAL, Reference
from tests.tiny import build_tiny_model

PROMPT = [261, 5, 40, 7, 99, 31, 12, 7, 250, 40]


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A tiny mixture of experts with the tokenizer of the tiny model."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    build_tiny_model(folder, seed=0, hidden=HIDDEN)
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    experts = Qwen3MoeConfig(
        vocab_size=config["vocab_size"], hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, intermediate_size=256, moe_intermediate_size=128, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=512, initializer_range=0.1, eos_token_id=config["eos_token_id"],
        bos_token_id=config["bos_token_id"], pad_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(experts).float().save_pretrained(folder)
    return folder


@pytest.fixture(params=REAL)
async def backend(request: pytest.FixtureRequest, mixture: Path, tmp_path: Path) -> AsyncIterator[Backend]:
    inference = {
        "engine": request.param, "dtype": "float32", "context_length": 256, "max_running": 8, "threads": 1,
        "start_timeout": 300.0,
    }  # fmt: skip
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(mixture)},
            "train_dataset": {"name": "arithmetic"},
            "valid_dataset": {"name": "arithmetic"},
            "env": {"id": "arithmetic"},
            "inference": inference,
            "launch": {"device": "cpu"},
        }
    )
    assert server_kind(request.param).capabilities.weight_names == "files"
    supervisor = Supervisor(tmp_path / "logs")
    try:
        (url,) = start_servers(recipe, mixture, tmp_path, supervisor)
        made = make_backend(recipe, url)
        yield made
        await made.close()
    finally:
        supervisor.stop()


async def test_trained_experts_are_served(backend: Backend, mixture: Path, tmp_path: Path) -> None:
    before = Reference(mixture).logprobs(PROMPT[:1], PROMPT[1:], 1.0)
    assert (torch.tensor(await backend.score(PROMPT, 1)) - before).abs().max() < 1e-3
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(-1.5)
    publisher = WeightPublisher(
        file_weights(model, model.named_parameters()), torch.float32, "disk", tmp_path / "run", is_writer=True
    )
    try:
        manifest = publisher.write(1)
        assert manifest is not None
        await backend.pause("abort")
        await backend.load(manifest.path, 1)
        assert await backend.verify(manifest) == []
        await backend.resume()
    finally:
        publisher.close()
    model.save_pretrained(tmp_path / "trained")
    after = Reference(tmp_path / "trained").logprobs(PROMPT[:1], PROMPT[1:], 1.0)
    assert (after - before).abs().max() > 0.1
    assert (torch.tensor(await backend.score(PROMPT, 1)) - after).abs().max() < 1e-3
