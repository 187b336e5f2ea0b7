"""Tests the setup of a torchrun rank."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from agentrl.config.load import load_recipe
from agentrl.launch.resolve import resolve
from agentrl.train.rank import join_group, set_threads


def test_a_rank_takes_the_threads_of_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    set_threads(resolve(load_recipe("arithmetic_grpo", ["trainer.threads=3"], device="cpu"), None))
    assert given == [3] and os.environ["OMP_NUM_THREADS"] == "3"


def test_a_gpu_that_is_not_there_is_an_error_and_no_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(device: torch.device) -> None:
        raise RuntimeError("no CUDA-capable device is detected")

    joined: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", no_gpu)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **more: joined.append("joined"))
    recipe = load_recipe("arithmetic_grpo", device="cuda")
    with pytest.raises(RuntimeError, match="no CUDA-capable device"):
        join_group(recipe)
    assert joined == []


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[object] = []
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "set_device", joined.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backends, *, timeout: joined.extend((backends, timeout)))
    device = join_group(load_recipe("arithmetic_grpo", ["trainer.batch_timeout=3000"], device="cuda"))
    assert device == torch.device("cuda", 5) and joined[:2] == [device, "cpu:gloo,cuda:nccl"]
    assert joined[2] == timedelta(seconds=3600), "other ranks wait for longer than rank 0 does for a batch"
