"""Training against a server that stays: what it serves in the end is what the trainer exported."""

import asyncio
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from agentrl.core.weight_manifest import checksum
from agentrl.inference.backend import Backend, SamplingParams
from tests.end_to_end import metrics, overrides, run
from tests.servers.conftest import Reference, Server

PROMPT = [261, 5, 40]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
async def test_three_updates_reach_the_server(server: Server, backend: Backend, transport: str, tmp_path: Path) -> None:
    if transport not in server.can.transports:
        pytest.skip("vLLM's own transfer engines run on NCCL only; the recipe refuses the combination")
    before = await backend.generate(PROMPT, GREEDY, request_id="before")
    result = await asyncio.to_thread(
        run,
        *("recipe", "run", "arithmetic_grpo"),
        *overrides(server.first, tmp_path, "three", f"inference.engine={server.kind}"),
        *(f"inference.urls=[{server.url}]", f"weights.transport={transport}", "inference.context_length=512"),
        *(["trainer.nproc=2"] if transport == "broadcast" else []),  # gathering is a collective, rank 0 alone sends
    )
    assert result.returncode == 0, result.stdout
    records = metrics(tmp_path / "three")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["mismatch/ratio_max"] < 5e-3 for record in records[1:]), "behavior logprobs are not ours"
    assert "could not be broadcast" not in (tmp_path / "three" / "logs" / "trainer.log").read_text()
    exported = load_file(tmp_path / "three" / "model" / "model.safetensors")
    original = load_file(server.first / "model.safetensors")
    assert all(not torch.equal(exported[name], tensor) for name, tensor in original.items())
    after = await backend.generate(PROMPT, GREEDY, request_id="after")
    assert await backend.version() == 3 and set(after.versions) == {3}
    assert after.token_ids != before.token_ids
    expected = Reference(tmp_path / "three" / "model").logprobs(PROMPT, after.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-3, rtol=0)
    if server.kind == "embedded":  # to the last bit
        held = httpx.post(f"{server.url}/weights_checker", json={"action": "checksum"}, timeout=60).json()["checksums"]
        assert held == {name: checksum(memoryview(t.view(torch.uint8).numpy())) for name, t in exported.items()}
    published = tmp_path / "three" / "weights"
    assert not published.is_dir() or not list(published.iterdir()), "published files were left behind"
    for name, tensor in exported.items() if server.kind != "vllm" else ():  # vLLM shows no values
        answer = httpx.post(f"{server.url}/get_weights_by_name", json={"name": name, "truncate_size": 4}, timeout=60)
        assert torch.equal(torch.tensor(answer.json()).reshape(-1), tensor[:4].reshape(-1)), name
