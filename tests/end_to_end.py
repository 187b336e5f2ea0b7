"""Runs of the command line with the tiny model, for the end-to-end tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
SECONDS = 240  # deadline of one run, which takes about 20 on two cores


def overrides(model: Path, run_dir: Path, name: str, *more: str) -> list[str]:
    """Settings of a run of three updates in which one batch follows from the other."""
    return [
        f"name={name}",
        f"launch.run_dir={run_dir}",
        "launch.device=cpu",
        f"model.name={model}",
        f"env.id={ROOT / 'tests' / 'toy.py'}:Letters",
        "sampling.max_new_tokens=8",
        "inference.context_length=256",
        "inference.dtype=float32",
        "inference.threads=1",
        "rollout.batch_size=4",
        "rollout.group_size=4",
        "rollout.max_staleness=0",
        "trainer.dtype=float32",
        "trainer.threads=1",
        "trainer.total_steps=3",
        "trainer.learning_rate=1e-2",
        "trainer.schedule=constant",
        "trainer.tokens_per_microbatch=300",
        "eval.every=0",
        "eval.tasks=4",
        *more,
    ]


def command(*arguments: str) -> list[str]:
    """``agentrl ...`` in this interpreter."""
    return [sys.executable, "-m", "agentrl", *arguments]


def environment() -> dict[str, str]:
    """Two processes share two cores: one thread each, and no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "160"}


def run(*arguments: str, cwd: Path = ROOT, timeout: float = SECONDS) -> "subprocess.CompletedProcess[str]":
    """Run to the end; standard error goes with standard output."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Records of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def processes_of(marker: Path) -> list[psutil.Process]:
    """Live processes whose command line names ``marker``."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(str(marker) in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found
