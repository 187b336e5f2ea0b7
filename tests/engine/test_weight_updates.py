"""Loading weights in place: whole or nothing, visible at once, provable."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.core.weight_manifest import checksum, fingerprint, mismatches
from agentrl.engine.params import BadRequestError, SamplingParams
from agentrl.engine.weight_store import digests, raw_bytes
from tests.engine.driving import SECONDS, Driver, reference_logprobs
from tests.engine.test_pausing import at

LONG = SamplingParams(max_new_tokens=16, ignore_eos=True, sampling_seed=5)


def spans(request) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in request.spans]


def test_new_weights_answer_and_their_fingerprints_equal_the_file(driver: Driver, other: Path) -> None:
    engine, model = driver.engine, driver.loaded.model
    driver.run(driver.make([1, 2]))
    engine.load(str(other), "1").result(SECONDS)
    (request,) = driver.run(driver.make([1, 2], LONG))
    fresh = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    assert (torch.tensor(request.logprobs).double() - reference_logprobs(fresh, request)).abs().max() < 1e-4
    assert spans(request) == [("1", 0, 16)]
    tensors = load_file(other / "model.safetensors")
    assert "lm_head.weight" not in tensors
    for action, digest in (("fingerprint", fingerprint), ("checksum", checksum)):
        expected = {name: digest(raw_bytes(tensor)) for name, tensor in tensors.items()}
        assert digests(model, action) == expected
        assert mismatches(expected, digests(model, action)) == []


@pytest.mark.parametrize("mode", ["retract", "in_place", "none"])
def test_a_running_request_spans_two_versions(driver: Driver, other: Path, mode: str) -> None:
    engine = driver.engine
    done = []

    def update() -> None:
        if mode != "none":
            engine.pause(mode)
        done.append(engine.load(str(other), "new"))
        engine.resume()

    (request,) = driver.run(driver.make([1, 2, 3], LONG, on_token=at(6, update)))
    done[0].result(SECONDS)
    assert spans(request) == [("0", 0, 6), ("new", 6, 16)]
    fresh = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    error = (torch.tensor(request.logprobs).double() - reference_logprobs(fresh, request)).abs()[6:].max()
    if mode == "in_place":  # its prefix was computed by the old weights
        assert error > 1e-2 and request.retractions == 0
    else:
        assert error < 1e-4 and request.retractions == 1


def test_abort_all_ends_requests_before_the_load(driver: Driver, other: Path) -> None:
    engine = driver.engine
    request = driver.make([1], LONG, on_token=at(2, lambda: engine.load(str(other), "1", abort_all=True)))
    driver.run(request)
    assert request.finish is not None and request.finish.kind == "abort"
    assert spans(request) == [("0", 0, 2)]


@pytest.mark.parametrize("fault", ["unknown", "missing", "shape", "kind", "empty", "garbage"])
def test_what_does_not_fit_is_refused_and_nothing_changes(
    driver: Driver, other: Path, tmp_path: Path, fault: str
) -> None:
    engine, model = driver.engine, driver.loaded.model
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    match fault:
        case "unknown":
            tensors["model.layers.9.mlp.up_proj.weight"] = tensors[name].clone()
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = tensors[name].T.contiguous()
        case "kind":
            tensors[name] = tensors[name].to(torch.int32)
    if fault == "garbage":
        (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    elif fault != "empty":
        save_file(tensors, tmp_path / "model.safetensors")
    before = digests(model, "checksum")
    with pytest.raises(BadRequestError) as refusal:
        engine.load(str(tmp_path), "1").result(SECONDS)
    if fault in ("missing", "shape", "kind"):
        assert name in str(refusal.value)
    assert digests(model, "checksum") == before
    assert engine.version == "0"


def test_a_tied_copy_and_another_float_type_are_accepted(driver: Driver, other: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(other / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    driver.engine.load(str(tmp_path), "1").result(SECONDS)
    live = dict(driver.loaded.model.state_dict())["model.embed_tokens.weight"]
    assert torch.equal(live, tensors["lm_head.weight"].float())


def test_weights_with_nan_fail_requests_and_good_ones_heal(driver: Driver, other: Path, tmp_path: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    driver.engine.load(str(tmp_path), "1").result(SECONDS)
    (sick,) = driver.run(driver.make([1]))
    assert sick.finish is not None and sick.finish.kind == "error" and "NaN" in sick.finish.message
    driver.engine.load(str(other), "2").result(SECONDS)
    (healed,) = driver.run(driver.make([1]))
    assert len(healed.output) == 8


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort", "none"])
def test_a_kept_prefix_does_not_survive_new_weights(driver: Driver, other: Path, mode: str) -> None:
    prompts = [[*range(40), 1, 2], [*range(40), 3]]
    driver.run(*(driver.make(prompt) for prompt in prompts))
    assert driver.engine.runner.kept.shared([*range(40), 250]) == 40
    if mode != "none":
        driver.engine.pause(mode)
    driver.engine.load(str(other), "1").result(SECONDS)
    driver.engine.resume()
    assert driver.engine.runner.kept.shared([*range(40), 250]) == 0
    fresh = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    for request in driver.run(*(driver.make(prompt, LONG) for prompt in prompts)):
        assert (torch.tensor(request.logprobs).double() - reference_logprobs(fresh, request)).abs().max() < 1e-4
