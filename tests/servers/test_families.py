"""Decoders other than Llama on real servers: their logprobs, a push of unchanged weights, and one of other weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.inference.backend import SamplingParams
from agentrl.train.export import saved_buffers
from agentrl.train.publishing import checked_names
from agentrl.weights.file_names import file_buffers
from agentrl.weights.file_publisher import WeightPublisher
from agentrl.weights.first_push import changed
from tests.servers.conftest import REAL, Reference, served
from tests.servers.families import build_family

PROMPT = torch.randint(
    5, 250, (280,), generator=torch.Generator().manual_seed(3)
).tolist()  # two blocks of vLLM's cache
CLOSE = 1e-2  # nats; other weights are off by several, and Apertus by 0.003 in other orders of float32 sums
FAMILIES = ("apertus", "gemma3_text")  # buffers in the module of weights; windows of 16 tokens


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", REAL)
async def test_a_family_is_served_before_and_after_pushes(kind: str, name: str, tmp_path: Path) -> None:
    """Unchanged weights change nothing; of new ones all arrive, and no prefix of the old ones is used again."""
    first, second = (build_family(name, tmp_path / str(seed), seed) for seed in (0, 1))
    async with served(kind, first, tmp_path) as backend:
        before = await backend.score(PROMPT, 1)
        assert gap(before, Reference(first), [], PROMPT) < CLOSE
        for version, folder in ((1, first), (2, second)):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            publisher = WeightPublisher(
                checked_names(model, list(model.named_parameters()), first), torch.float32, "disk", tmp_path / "run",
                is_writer=True, beside=file_buffers(model, saved_buffers(model), first),
            )  # fmt: skip
            manifest = publisher.write(version)
            assert manifest is not None
            await backend.pause("retract")
            await backend.load(manifest.path, version)
            assert await backend.verify(manifest) == []
            await backend.resume()
            publisher.close()
            scores = await backend.score(PROMPT, 1)
            assert gap(scores, Reference(folder), [], PROMPT) < CLOSE
            assert (changed({"": before}, {"": scores}) is None) == (version == 1)
            for again in range(2):  # the second time its prompt stands in the prefix cache
                answer = await backend.generate(PROMPT, SamplingParams(12, seed=1), request_id=f"{version}-{again}")
                assert set(answer.versions) == {version}
                assert gap(answer.logprobs, Reference(folder), PROMPT, answer.token_ids) < CLOSE


def gap(found: list[float], reference: Reference, prompt: list[int], ids: list[int]) -> float:
    """Largest difference of logprobs; without a prompt the first id has none."""
    prompt, ids = (prompt, ids) if prompt else (ids[:1], ids[1:])
    return (torch.tensor(found) - reference.logprobs(prompt, ids, 1.0)).abs().max().item()
