"""Inference servers that a contract is held against: ours always, SGLang and vLLM with ``make test-servers``."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.recipe import Recipe
from agentrl.inference.backend import Backend
from agentrl.inference.kinds.kind import Capabilities, server_kind
from agentrl.launch.servers import start_servers
from agentrl.launch.supervisor import Supervisor
from agentrl.rollout.assemble import make_backend
from tests.tiny import build_tiny_model

REAL = [pytest.param(name, marks=pytest.mark.servers) for name in ("sglang", "vllm")]
NOT_NEUTRAL = {"do_sample": True, "repetition_penalty": 1.5, "temperature": 0.5, "top_k": 3, "top_p": 0.7, "min_p": 0.1}
"""Sampling options of the models' own, which no request may get: every answer is held against the plain policy."""
HIDDEN = 256  # heads of 64: vLLM has no smaller ones on a CPU


@dataclass
class Server:
    """A running server, and what it was started from."""

    recipe: Recipe
    url: str
    first: Path
    second: Path

    @property
    def kind(self) -> str:
        return self.recipe.inference.engine

    @property
    def can(self) -> Capabilities:
        return server_kind(self.kind).capabilities


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights only."""
    folders = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for seed, folder in enumerate(folders):
        build_tiny_model(folder, seed=seed, hidden=HIDDEN)
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | NOT_NEUTRAL))
    return folders


@pytest.fixture(scope="session", params=["embedded", *REAL])
def server(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(models[0])},
            "train_dataset": {"name": "arithmetic"},
            "valid_dataset": {"name": "arithmetic"},
            "env": {"id": "arithmetic"},
            "sampling": {"max_new_tokens": 64},
            "inference": {
                "engine": request.param, "dtype": "float32", "context_length": 512, "max_running": 16, "threads": 1,
                "start_timeout": 300.0,
            },
            "launch": {"device": "cpu"},
        }
    )  # fmt: skip
    supervisor = Supervisor(folder / "logs")
    try:
        (url,) = start_servers(recipe, models[0], folder, supervisor)
        yield Server(recipe, url, *models)
    finally:
        supervisor.stop()


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[Backend]:
    """A client of the server, which holds the first model's weights as version 0."""
    made = make_backend(server.recipe, server.url)
    await made.pause("abort")
    await made.load(str(server.first), 0)
    await made.resume()
    yield made
    await made.close()


@asynccontextmanager
async def served(kind: str, model: Path, folder: Path, *, replays: bool = False) -> AsyncIterator[Backend]:
    """A server of a kind, and a connection to it."""
    inference = {
        "engine": kind, "dtype": "float32", "context_length": 512, "max_running": 8, "threads": 1,
        "start_timeout": 300.0,
    }  # fmt: skip
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(model)},
            "train_dataset": {"name": "arithmetic"},
            "valid_dataset": {"name": "arithmetic"},
            "env": {"id": "arithmetic"},
            "inference": inference,
            "sampling": {"max_new_tokens": 64},
            "launch": {"device": "cpu"},
            "trainer": {"replay_routing": replays},
        }
    )
    supervisor = Supervisor(folder / "logs")
    try:
        (url,) = start_servers(recipe, model, folder, supervisor)
        made = make_backend(recipe, url)
        yield made
        await made.close()
    finally:
        supervisor.stop()


class Reference:
    """A plain float32 forward pass."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
        """``[answer]`` log-probabilities of the answer's tokens."""
        logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        every = torch.log_softmax(logits / temperature, -1)
        return every.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)


@pytest.fixture(scope="session")
def references(models: tuple[Path, Path]) -> tuple[Reference, Reference]:
    return Reference(models[0]), Reference(models[1])
