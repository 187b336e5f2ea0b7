"""A mixture of experts on real servers: new weights reach each expert, and answers name the experts of each token."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.inference.backend import Backend, SamplingParams
from agentrl.inference.kinds.kind import server_kind
from agentrl.models.routing import find_routers
from agentrl.weights.file_names import file_weights
from agentrl.weights.file_publisher import WeightPublisher
from tests.servers.conftest import HIDDEN, REAL, Reference, served
from tests.tiny_mixture import build_tiny_mixture

PROMPT = [261, 5, 40, 7, 99, 31, 12, 7, 250, 40]


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A tiny mixture of experts with the tokenizer of the tiny model."""
    return build_tiny_mixture(tmp_path / "mixture", hidden=HIDDEN, head_dim=64)


@pytest.fixture(params=REAL)
async def backend(request: pytest.FixtureRequest, mixture: Path, tmp_path: Path) -> AsyncIterator[Backend]:
    assert server_kind(request.param).capabilities.weight_names == "files"
    async with served(request.param, mixture, tmp_path, replays=False) as made:
        yield made


NO_TRITON = pytest.mark.skip(
    reason="vLLM 0.32 names experts with its model runner V2 alone, which needs Triton: no CPU"
)


@pytest.fixture(params=["embedded", REAL[0], pytest.param("vllm", marks=[pytest.mark.servers, NO_TRITON])])
async def naming(request: pytest.FixtureRequest, mixture: Path, tmp_path: Path) -> AsyncIterator[Backend]:
    """A server that names experts."""
    async with served(request.param, mixture, tmp_path, replays=True) as made:
        yield made


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


async def test_answers_name_the_experts_that_the_model_itself_chooses(naming: Backend, mixture: Path) -> None:
    """From any position of the prompt; also of a prompt whose beginning is in the server's prefix cache."""
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    routers = find_routers(model)
    params = SamplingParams(max_new_tokens=8, seed=1, experts_from=0)
    first = await naming.generate(PROMPT, params, request_id="first")
    longer = [*PROMPT, *first.token_ids, 17, 5, 61]
    start = len(PROMPT) + len(first.token_ids) - 1
    second = await naming.generate(longer, replace(params, experts_from=start), request_id="second")
    for prompt, found, begin in ((PROMPT, first, 0), (longer, second, start)):
        assert found.experts is not None and len(found.experts) == len(prompt) + len(found.token_ids) - 1 - begin
        with routers.recorded() as taken, torch.no_grad():
            model(input_ids=torch.tensor([[*prompt, *found.token_ids][:-1]]), use_cache=False)
        own = taken[0][begin:].view(-1, len(routers), routers.chosen).sort(-1).values
        named = torch.from_numpy(found.experts.array()).view(own.shape).sort(-1).values
        assert torch.equal(named.to(own.dtype), own)
