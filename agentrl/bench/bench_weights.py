"""Compares a weight push into the embedded engine with a plain copy of the same bytes.

Guarantees: the server is a process of its own, called over HTTP; the weights are written by the trainer's publisher,
and all of them change with every push.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.bench.report import default_model
from agentrl.core.weight_manifest import mismatches

if TYPE_CHECKING:
    from agentrl.weights.file_publisher import WeightPublisher

START_SECONDS = 300.0
POLL_SECONDS = 0.1


def run(model: str | None = None, repeats: int = 5, dtype: str = "bfloat16") -> dict[str, list[float]]:
    """Push weights ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Number of measured pushes, after two that warm up (the publisher has two buffers).
        dtype: Dtype of the server and the files.

    Returns:
        ``push_vs_memcpy``: seconds of writing, pause, load and resume over those of a copy of the same bytes in memory;
        ``push_seconds``: pause, load, verification and resume; ``load_seconds``: the load as the server reports it;
        ``write_seconds``: the publisher's part; ``memcpy_seconds``: the copy.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.weights.file_publisher import WeightPublisher

    path = model or default_model()
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        publisher = WeightPublisher(
            policy.named_parameters(), getattr(torch, dtype), "shm", Path(folder) / "weights", is_writer=True
        )
        process, url = _start(path, dtype, Path(folder) / "ready.json")
        try:
            for repeat in range(-2, repeats):
                for parameter in policy.parameters():
                    parameter.data.mul_(1.01)
                measured = _push(url, publisher, repeat + 3)
                measured["memcpy_seconds"] = _memcpy_seconds([p.data for p in policy.parameters()])
                written = measured["write_seconds"] + measured["push_seconds"] - measured.pop("verify_seconds")
                measured["push_vs_memcpy"] = written / measured["memcpy_seconds"]
                for key, value in measured.items() if repeat >= 0 else ():
                    figures.setdefault(key, []).append(value)
        finally:
            process.terminate()
            process.wait()
            publisher.close()
    return figures


def _memcpy_seconds(tensors: list[Any]) -> float:
    """Seconds of a copy of the tensors into memory that was touched before; the faster of two copies."""
    targets = [tensor.clone() for tensor in tensors]
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def _start(model: str, dtype: str, ready: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a server; returns its process and URL."""
    command = [sys.executable, "-m", "agentrl.engine", "--model", model, "--dtype", dtype]
    process = subprocess.Popen([*command, "--ready-file", str(ready), "--parent-pid", str(os.getpid())])
    deadline = time.monotonic() + START_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError("the embedded engine did not start")
        time.sleep(POLL_SECONDS)
    return process, json.loads(ready.read_text())["url"]


def _push(url: str, publisher: "WeightPublisher", version: int) -> dict[str, float]:
    """Runs one weight push and measures the seconds of its parts."""
    begun = time.perf_counter()
    manifest = publisher.write(version)
    assert manifest is not None and manifest.path is not None
    written = time.perf_counter()
    _post(url, "/pause_generation", {"mode": "retract"})
    folder = str(Path(manifest.path).parent) if manifest.path.endswith(".safetensors") else manifest.path
    loaded = _post(url, "/update_weights_from_disk", {"model_path": folder, "weight_version": str(version)})
    checking = time.perf_counter()
    actual = _post(url, "/weights_checker", {"action": "fingerprint"})["fingerprints"]
    wrong = mismatches(manifest.fingerprints, actual)
    if wrong:
        raise RuntimeError(f"{len(wrong)} fingerprints differ, the first is {wrong[0]}")
    checked = time.perf_counter()
    _post(url, "/continue_generation", {})
    return {
        "push_seconds": time.perf_counter() - written,
        "load_seconds": loaded["seconds"],
        "write_seconds": written - begun,
        "verify_seconds": checked - checking,
    }


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        return json.loads(response.read())
