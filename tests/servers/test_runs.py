"""Training against a server that stays: what it serves in the end is what the trainer exported."""

from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end import metrics, overrides, run
from tests.servers.conftest import Server

TRANSPORTS = ["disk", "broadcast"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_updates_reach_the_server(server: Server, transport: str, tmp_path: Path) -> None:
    if server.kind == "vllm" and transport == "broadcast":
        pytest.skip("vLLM's own transfer engines run on NCCL only; the recipe refuses the combination")
    ask = {"input_ids": [261, 5, 40], "sampling_params": {"max_new_tokens": 12, "temperature": 0.0}}
    before = httpx.post(f"{server.url}/generate", json=ask, timeout=60).json() if server.kind != "vllm" else {}
    result = run(
        *("recipe", "run", "arithmetic_grpo"),
        *overrides(server.first, tmp_path, "three", f"inference.engine={server.kind}"),
        *(f"inference.urls=[{server.url}]", f"weights.transport={transport}", "inference.context_length=512"),
    )
    assert result.returncode == 0, result.stdout
    records = metrics(tmp_path / "three")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["train/ratio_deviation_max"] < 5e-3 for record in records[1:]), "behavior logprobs are not ours"
    assert "could not be broadcast" not in (tmp_path / "three" / "logs" / "trainer.log").read_text()
    exported = load_file(tmp_path / "three" / "model" / "model.safetensors")
    original = load_file(server.first / "model.safetensors")
    assert all(not torch.equal(exported[name], tensor) for name, tensor in original.items())
    if server.kind == "vllm":
        assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == "3"
        return
    assert httpx.get(f"{server.url}/model_info").json()["weight_version"] == "3"
    for name, tensor in exported.items():
        answer = httpx.post(f"{server.url}/get_weights_by_name", json={"name": name, "truncate_size": 4}, timeout=60)
        held = torch.tensor(answer.json())
        assert torch.equal(held.reshape(-1), tensor[:4].reshape(-1)), name
    after = httpx.post(f"{server.url}/generate", json=ask, timeout=60).json()
    assert after["output_ids"] != before["output_ids"]
