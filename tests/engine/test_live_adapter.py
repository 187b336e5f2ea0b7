"""A LoRA adapter in PEFT's format on the live weights: it replaces the one before, and its base can be proven."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.core.weight_manifest import fingerprint
from agentrl.engine.engine import Engine
from agentrl.engine.model import load_model
from agentrl.engine.params import BadRequestError, SamplingParams
from agentrl.engine.runner import ModelRunner
from agentrl.engine.weight_store import digests, raw_bytes
from tests.engine.driving import SECONDS, Driver, reference_logprobs

LONG = SamplingParams(max_new_tokens=16, ignore_eos=True, sampling_seed=5)


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    """In float32, also where the CPU has bfloat16."""
    build = partial(ModelRunner, load_model(str(tiny), "float32", "cpu"), 8)
    started = Engine(build, max_running=8, max_waiting=64, seed=0, threads=1).start()
    started.ready.result(SECONDS)
    yield started
    assert started.stop(timeout=SECONDS)


def write_adapter(model: Path, folder: Path, seed: int, targets: list[str]) -> Path:
    """Saved by PEFT itself."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of all layers, and one of a few."""
    made = tmp_path_factory.mktemp("adapters")
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return [write_adapter(tiny, made / "every", 0, every), write_adapter(tiny, made / "few", 1, ["q_proj", "up_proj"])]


def merged(model: Path, adapter: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()  # type: ignore[operator]


def gap(driver: Driver, model: torch.nn.Module) -> float:
    """Between the logprobs of an answer and those of a plain model."""
    (request,) = driver.run(driver.make([1, 2, 3], LONG))
    return (torch.tensor(request.logprobs).double() - reference_logprobs(model, request)).abs().max().item()


def test_an_adapter_answers_as_peft_merges_it_and_the_next_one_takes_its_place(
    driver: Driver, tiny: Path, other: Path, adapters: list[Path]
) -> None:
    engine, model = driver.engine, driver.loaded.model
    plain = digests(model, "checksum")
    assert gap(driver, merged(tiny, adapters[0])) > 1e-2, "the adapter changes too little to show anything"
    for version, adapter in enumerate([adapters[0], adapters[1], adapters[0]], start=1):
        engine.load(str(adapter), str(version)).result(SECONDS)
        assert gap(driver, merged(tiny, adapter)) < 1e-4
    engine.load(str(tiny), "4").result(SECONDS)
    assert digests(model, "checksum") == plain and engine.adapter.digests("checksum") == {}
    engine.load(str(other), "5").result(SECONDS)
    engine.load(str(adapters[1]), "6").result(SECONDS)
    assert gap(driver, merged(other, adapters[1])) < 1e-4, "an adapter counts from the latest whole weights"


def test_weights_that_come_one_by_one_take_the_adapter_out(driver: Driver, tiny: Path, adapters: list[Path]) -> None:
    engine = driver.engine
    engine.load(str(adapters[1]), "1").result(SECONDS)
    tensors = load_file(tiny / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    engine.take({name: tensors[name] + 1}, "2", abort_all=False).result(SECONDS)
    live = driver.loaded.model.state_dict()
    assert torch.equal(live[name], tensors[name] + 1)
    assert all(torch.equal(live[key], tensor) for key, tensor in tensors.items() if key != name)


def test_the_server_proves_the_adapter_and_the_weights_beneath_it(
    client: httpx.Client, tiny: Path, adapters: list[Path]
) -> None:
    body = {"model_path": str(adapters[1]), "weight_version": "1"}
    assert client.post("/update_weights_from_disk", json=body).json()["success"]
    found = client.post("/weights_checker", json={"action": "fingerprint"}).json()["fingerprints"]
    base, adapter = load_file(tiny / "model.safetensors"), load_file(adapters[1] / "adapter_model.safetensors")
    for name, tensor in adapter.items():
        assert found[name] == fingerprint(raw_bytes(tensor))
    layer = "model.layers.1.mlp.up_proj"
    assert found[f"{layer}.base_layer.weight"] == fingerprint(raw_bytes(base[f"{layer}.weight"]))
    assert found[f"{layer}.weight"] != found[f"{layer}.base_layer.weight"]
    assert found.keys() >= base.keys(), "the rest is told as before"


@pytest.mark.parametrize("fault", ["dora", "bias", "no rank", "unknown", "shape", "half", "garbage", "config"])
def test_what_cannot_be_added_exactly_is_refused_and_nothing_changes(
    driver: Driver, adapters: list[Path], tmp_path: Path, fault: str
) -> None:
    engine, model = driver.engine, driver.loaded.model
    engine.load(str(adapters[1]), "1").result(SECONDS)
    before = digests(model, "checksum") | engine.adapter.digests("checksum")
    config = json.loads((adapters[0] / "adapter_config.json").read_text())
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    match fault:
        case "dora":
            config["use_dora"] = True
        case "bias":
            config["bias"] = "all"
        case "no rank":
            del config["r"]
        case "unknown":
            for part in ("A", "B"):
                tensors[f"base_model.model.model.layers.9.mlp.up_proj.lora_{part}.weight"] = torch.zeros(3, 3)
        case "shape":
            tensors[name] = tensors[name][:, :-1].contiguous()
        case "half":
            del tensors[name]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{" if fault == "config" else json.dumps(config))
    if fault == "garbage":
        (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(BadRequestError):
        engine.load(str(tmp_path), "2").result(SECONDS)
    assert digests(model, "checksum") | engine.adapter.digests("checksum") == before
    assert engine.version == "1"
