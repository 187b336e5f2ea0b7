"""The GPU's benchmark in small on a CPU, and what its figures are made of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from agentrl.bench import bench_gpu_mesh
from agentrl.bench.gpu_sides import EIGHT, EIGHT_LONG, FULL, LONG, TINY, Size, make_batch, make_model
from agentrl.bench.model_flops import Work, peak_tflops, update_flops
from agentrl.train.microbatches import plan_packed
from agentrl.train.rows import build_rows

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_script_takes_its_whole_way_on_a_cpu() -> None:
    arguments = ["--tiny", "--device", "cpu", "--repeats", "1"]
    result = subprocess.run(
        [ROOT / "scripts" / "gpu_bench.sh", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    wanted = {"tflops", "checkpointed_tflops", "plain_head_peak_gib", "head_ms", "plain_head_ms", "decode_tokens_s"}
    assert wanted <= figures.keys()
    assert "mfu" not in figures, "a CPU has no published peak here"
    work = Work.of(make_batch(TINY), TINY.tokens)
    assert figures["tokens_s"]["median"] * figures["update_s"]["median"] == pytest.approx(work.tokens)


@pytest.mark.long
def test_the_script_tries_meshes_on_a_cpu() -> None:
    arguments = ["mesh", "--tiny", "--device", "cpu", "--ranks", "4", "--repeats", "1"]
    result = subprocess.run(
        [ROOT / "scripts" / "gpu_bench.sh", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    keys = ("update_s", "tflops", "tokens_s", "peak_gib")
    assert figures.keys() == {f"{case}_{key}" for case in ("tiny", "tiny_tp2_cp2") for key in keys}
    work = Work.of(make_batch(TINY), TINY.tokens)
    flops = update_flops(make_model(TINY, torch.device("meta")), work)
    for case in ("tiny", "tiny_tp2_cp2"):
        seconds = figures[f"{case}_update_s"]["median"]
        assert figures[f"{case}_tokens_s"]["median"] * seconds == pytest.approx(work.tokens)
        assert figures[f"{case}_tflops"]["median"] * 1e12 * 4 * seconds == pytest.approx(flops), "of each rank"


def test_a_case_that_the_ranks_do_not_fill_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"split": bench_gpu_mesh.Case(TINY, bench_gpu_mesh.TENSOR_AND_CONTEXT)}
    assert bench_gpu_mesh.run(1, "cpu", 2, cases) == {}
    assert "split: needs a multiple of 4 ranks, left out on 2" in capsys.readouterr().err


def test_a_case_that_does_not_fit_is_left_out_and_another_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        (Path(command[-1]) / bench_gpu_mesh.OUT_OF_MEMORY).touch()
        return subprocess.CompletedProcess(command, 1, "")

    monkeypatch.setattr(bench_gpu_mesh.subprocess, "run", full)
    assert bench_gpu_mesh.run(1, "cpu", 2, {"large": bench_gpu_mesh.Case(FULL)}) == {}
    assert "large: out of memory on 2 ranks, left out" in capsys.readouterr().err
    failed = subprocess.CompletedProcess([], 1, "no such kernel")
    monkeypatch.setattr(bench_gpu_mesh.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="large failed: no such kernel"):
        bench_gpu_mesh.run(1, "cpu", 2, {"large": bench_gpu_mesh.Case(FULL)})


@pytest.mark.parametrize(("size", "least"), [(EIGHT, 8.0e9), (EIGHT_LONG, 8.0e9), (LONG, 1.5e9)])
def test_models_and_contexts_are_those_that_are_named(size: Size, least: float) -> None:
    parameters = sum(one.numel() for one in make_model(size, torch.device("meta")).parameters())
    assert least < parameters < 1.1 * least
    if size is not EIGHT:
        assert size.prompt + size.answer == size.tokens == 32768
        assert size.groups * size.members % 8 == 0, "a sequence for each of 8 GPUs"


def test_operations_are_those_that_torch_counts() -> None:
    model = make_model(TINY, torch.device("cpu"))
    model.set_attn_implementation("eager")
    length = 40
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None], use_cache=False).logits.sum().backward()
    work = Work(tokens=length, predicted=length, pairs=length * length, trained=length)  # eager attention is dense
    assert update_flops(model, work) == pytest.approx(counter.get_total_flops(), rel=0.02), (
        "norms and biases are no products"
    )


def test_the_full_batch_fills_micro_batches_of_16k() -> None:
    batch = make_batch(FULL)
    rows = build_rows(batch.branches, batch.tokens, FULL.tokens, float("inf"))
    work = Work.of(batch, FULL.tokens)
    assert len(rows) == 8, "a group is one tree"
    assert work.trained == 64 * 960
    assert work.tokens == 8 * (256 + 8 * 959)
    (plan,) = plan_packed(rows, 1, FULL.tokens, 4096.0)
    assert [sum(map(len, batch)) for batch in plan] == [work.tokens // 4] * 4
    assert work.tokens // 4 > 0.96 * FULL.tokens


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_published_peaks_by_name(card: str, peak: float | None) -> None:
    assert peak_tflops(card) == peak
