"""Tests adapters: trained parameters, checkpoints, pushed weights, and equal results on one rank and on two."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from agentrl.config.adapter import AdapterConfig
from agentrl.models.pixels import vision_parameters
from agentrl.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.train.checkpoint_saver import CheckpointSaver
from agentrl.train.lora import add_adapter, save_adapter
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import load_model, reshard
from agentrl.weights.file_publisher import WeightPublisher
from agentrl.weights.gather import full_tensor
from agentrl.weights.lora_weights import plain_weights
from tests.end_to_end import ROOT, SECONDS
from tests.tiny_vision import build_tiny_vision
from tests.train.adapting import LORA, VARIANTS, make_engine, steps, weights
from tests.train.test_rows import collated, random_sequences


@pytest.fixture(scope="module")
def on_two_ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the weights of every variant after three steps on two ranks."""
    out = tmp_path_factory.mktemp("two-ranks")
    arguments = [sys.executable, "-m", "tests.train.adapting", str(tiny_model), str(out / "rendezvous")]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), "2", str(out)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        output, _ = rank.communicate(timeout=SECONDS)
        assert rank.returncode == 0, output
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_give_the_weights_of_one_after_three_steps(
    variant: str, tiny_model: Path, mesh: DeviceMesh, on_two_ranks: Path
) -> None:
    engine = make_engine(tiny_model, mesh, VARIANTS[variant])
    before = weights(engine)
    steps(engine, 0, 3)
    one, two = weights(engine), load_file(on_two_ranks / f"{variant}.safetensors")
    assert one.keys() == two.keys()
    moved = {name: (one[name] - before[name]).abs().max().item() for name in one}
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=max(1e-6, 1e-3 * moved[name]), rtol=1e-5, msg=name)
    targets = {name for name in one if "_proj." in name} if "lora" in variant else one.keys()
    assert {name for name, distance in moved.items() if distance > 1e-4} == set(targets), "what an adapter may change"


def some_batch() -> MicroBatch:
    return collated(random_sequences(9, 2), 100)


@torch.no_grad()
def logprobs(policy: torch.nn.Module) -> Tensor:
    found = policy(some_batch())[0]
    reshard(policy)
    return found


def test_only_adapters_are_trained_and_saved_and_a_resumed_run_goes_on_exactly(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model, mesh, LORA)
    adapters = {name for name, p in engine.policy.named_parameters() if p.requires_grad}
    assert adapters and all("lora_" in name for name in adapters)
    assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == len(adapters)
    steps(engine, 0, 2)
    saver = CheckpointSaver(tmp_path, keep=1)
    save_checkpoint(saver, 2, engine, {})
    saver.wait()
    saved = tmp_path / "step-000002"
    names = FileSystemReader(saved).read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in names if name.startswith("model.")} == adapters
    steps(engine, 2, 4)
    resumed = make_engine(tiny_model, mesh, LORA)
    load_checkpoint(saved, resumed)
    steps(resumed, 2, 4)
    expected = weights(engine)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_what_is_gathered_and_what_is_saved_is_what_peft_makes_of_it(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model, mesh, {**LORA, "lora_targets": ["q_proj", "down_proj"]})
    steps(engine, 0, 2)
    save_adapter(engine.policy.model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    merged: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()  # type: ignore[operator]
    found, expected = weights(engine), dict(merged.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-6, rtol=1e-5, msg=name)
    batch = some_batch()
    hidden = merged.model(
        input_ids=batch.token_ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).last_hidden_state.flatten(0, 1)[batch.sources]
    plain = (hidden @ merged.lm_head.weight.t() / 0.8).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs(engine.policy), plain[batch.trained].detach(), atol=1e-5, rtol=0)


def test_the_reference_is_the_model_without_adapters_and_has_no_weights_of_its_own(
    tiny_model: Path, mesh: DeviceMesh
) -> None:
    engine = make_engine(tiny_model, mesh, {**LORA, "kl_coef": 0.1})
    assert engine.reference is not None and engine.moving_reference is None
    before = logprobs(engine.policy)
    torch.testing.assert_close(logprobs(engine.reference), before, atol=0, rtol=0)
    steps(engine, 0, 2)
    assert (logprobs(engine.policy) - before).abs().max() > 1e-3
    torch.testing.assert_close(logprobs(engine.reference), before, atol=0, rtol=0)
    assert {id(p) for p in engine.reference.parameters()} <= {id(p) for p in engine.policy.parameters()}


def test_layers_that_multiply_from_the_left_are_merged_as_well() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    plain, adapted = GPT2LMHeadModel(GPT2Config(**shape)).eval(), GPT2LMHeadModel(GPT2Config(**shape)).eval()
    adapted.load_state_dict(plain.state_dict())
    add_adapter(adapted, AdapterConfig(lora_rank=2), seed=0, base="gpt2")
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    ids = torch.arange(10)[None]
    before = plain(ids).logits
    missing, unknown = plain.load_state_dict({n: full_tensor(w) for n, w in plain_weights(adapted)}, strict=False)
    assert missing == ["lm_head.weight"] and unknown == []
    assert (plain(ids).logits - before).abs().max() > 1e-2
    torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens"])
def test_a_target_that_gets_no_adapter_is_refused_with_those_that_can(
    target: str, tiny_model: Path, mesh: DeviceMesh
) -> None:
    with pytest.raises(ValueError, match=rf"lora_targets=\['{target}'\].*q_proj"):
        make_engine(tiny_model, mesh, {**LORA, "lora_targets": ["q_proj", target]})


def test_frozen_weights_do_not_count_as_left_unchanged(tiny_model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    engine = make_engine(tiny_model, mesh, LORA)
    publisher = WeightPublisher(plain_weights(engine.policy.model), torch.float32, "disk", tmp_path, is_writer=True)
    publisher.write(0)
    steps(engine, 0, 1)
    publisher.write(1)
    assert publisher.unchanged == 0.0
    publisher.close()


def test_shards_in_the_hosts_memory_give_the_same_weights(tiny_model: Path, mesh: DeviceMesh) -> None:
    plain, offloaded = (make_engine(tiny_model, mesh, {}, offload=offload) for offload in (False, True))
    for engine in (plain, offloaded):
        steps(engine, 0, 2)
    expected = weights(plain)
    for name, tensor in weights(offloaded).items():
        assert torch.equal(tensor, expected[name]), name


def adapted(model: Any, **config: Any) -> set[str]:
    """Paths of the layers that have an adapter."""
    add_adapter(model, AdapterConfig(lora_rank=2, **config), seed=0, base="m")
    return {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def test_of_a_model_with_an_image_tower_the_text_side_alone_is_adapted(tiny_vision: Path) -> None:
    model = load_model(tiny_vision)
    tower = {id(one) for one in vision_parameters(model)}
    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and id(m.weight) not in tower}
    found = adapted(model)
    assert found == linear - {"lm_head"} and len(found) == 14, "seven in each of two layers"
    assert all(not p.requires_grad for p in vision_parameters(model))


def test_a_named_target_is_adapted_in_the_tower_too(tmp_path: Path) -> None:
    found = adapted(load_model(build_tiny_vision(tmp_path, "idefics3")), lora_targets=("q_proj",))
    assert len(found) == 4 and len([name for name in found if "vision" in name]) == 2, "two layers each"
