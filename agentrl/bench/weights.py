"""How long a weight push into the embedded engine takes.

Guarantees: a real server in its own process, spoken to over HTTP, and the whole transaction in the figure: pause,
load, verify fingerprints, resume. Writing the file is outside of it (the trainer double-buffers), and so is the start.
The sources alternate between two sets of weights, so every push changes every byte that the engine holds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from agentrl.bench.report import default_model
from agentrl.core.weights import WEIGHTS_FILE, fingerprint, mismatches

START_SECONDS = 300.0
POLL_SECONDS = 0.1


def run(model: str | None = None, repeats: int = 5, dtype: str = "bfloat16") -> dict[str, list[float]]:
    """Push weights ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Measured pushes, after one that warms up.
        dtype: Of the server and the files.

    Returns:
        ``push_seconds``, ``load_seconds`` (of it, the server's load) and ``write_seconds`` (the files, outside of it).
    """
    path = model or default_model()
    root = Path(tempfile.mkdtemp(prefix="agentrl-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    figures: dict[str, list[float]] = {"push_seconds": [], "load_seconds": [], "write_seconds": []}
    try:
        sources = [_write_source(Path(path), root / str(index), dtype, index) for index in range(2)]
        figures["write_seconds"] = [seconds for _, _, seconds in sources]
        process, url = _start(path, dtype, root / "ready.json")
        try:
            for repeat in range(repeats + 1):
                folder, expected, _ = sources[repeat % 2]
                total, load = _push(url, folder, expected, repeat)
                if repeat:
                    figures["push_seconds"].append(total)
                    figures["load_seconds"].append(load)
        finally:
            process.terminate()
            process.wait()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return figures


def _write_source(model: Path, folder: Path, dtype: str, index: int) -> tuple[Path, dict[str, str], float]:
    """A set of weights, scaled by ``index`` so that the sets differ; its fingerprints; seconds to write."""
    import torch
    from safetensors.torch import load_file, save_file

    from agentrl.inference.engine.weights import raw_bytes

    folder.mkdir(parents=True)
    source = load_file(model / WEIGHTS_FILE)
    tensors = {name: (tensor * (1 + 0.01 * index)).to(getattr(torch, dtype)) for name, tensor in source.items()}
    expected = {name: fingerprint(raw_bytes(tensor)) for name, tensor in tensors.items()}
    start = time.perf_counter()
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder, expected, time.perf_counter() - start


def _start(model: str, dtype: str, ready: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server process and its URL."""
    command = [sys.executable, "-m", "agentrl.inference.engine", "--model", model, "--dtype", dtype]
    process = subprocess.Popen([*command, "--ready-file", str(ready), "--parent-pid", str(os.getpid())])
    deadline = time.monotonic() + START_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError("the embedded engine did not start")
        time.sleep(POLL_SECONDS)
    return process, json.loads(ready.read_text())["url"]


def _push(url: str, folder: Path, expected: dict[str, str], version: int) -> tuple[float, float]:
    """One transaction; its seconds and the seconds of the load alone."""
    start = time.perf_counter()
    _post(url, "/pause_generation", {"mode": "retract"})
    loaded = _post(url, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})
    actual = _post(url, "/weights_checker", {"action": "fingerprint"})["fingerprints"]
    wrong = mismatches(expected, actual)
    if wrong:
        raise RuntimeError(f"{len(wrong)} fingerprints differ, the first is {wrong[0]}")
    _post(url, "/continue_generation", {})
    return time.perf_counter() - start, loaded["seconds"]


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        return json.loads(response.read())
