"""Notes what a run was started with: command line, packages, git state, machine.

Guarantees: ``about.json`` in the run's folder has one record for each start, the latest last; it holds no secret
(:mod:`agentrl.core.redacted`); what cannot be found out is absent, and ends no run.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from agentrl import __version__
from agentrl.core.redacted import redacted_command, redacted_text
from agentrl.host.cores import usable_cores
from agentrl.host.process import write_json

FILE = "about.json"
SECONDS = 5.0  # for each program that is asked
MOST_CHANGES = 50  # changed files that are named


def note_start(run_dir: Path) -> None:
    """Add a record of this start to ``about.json``."""
    write_json(run_dir / FILE, {"starts": [*_earlier(run_dir / FILE), start_record()]})


def _earlier(file: Path) -> list[Any]:
    try:
        return list(json.loads(file.read_text())["starts"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # none, or one that a killed process left


def start_record() -> dict[str, Any]:
    """Returns what this process was started with, as plain data."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redacted_command(sys.argv),
        "folder": os.getcwd(),
        "agentrl": __version__,
        "python": platform.python_version(),
        "packages": packages(),
        "git": {"here": git_state(Path.cwd()), "agentrl": git_state(Path(__file__).resolve().parent)},
        "machine": machine(),
    }


@cache
def packages() -> dict[str, str]:
    """Returns the versions of all installed packages, by name."""
    found = {}
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found[name] = one.version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns commit, branch, remote and changed files of the repository around a folder; ``None`` if there is none."""
    commit = _said(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = (_said(["git", "-C", str(folder), "status", "--porcelain"]) or "").splitlines()
    return {
        "commit": commit,
        "branch": _said(["git", "-C", str(folder), "rev-parse", "--abbrev-ref", "HEAD"]),
        "remote": redacted_text(_said(["git", "-C", str(folder), "remote", "get-url", "origin"]) or "") or None,
        "changed": changes[:MOST_CHANGES],
        "changed_files": len(changes),
    }


def machine() -> dict[str, Any]:
    """Returns the machine: host, system, processor, cores, memory, accelerators."""
    gpus = (_said(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]) or "").splitlines()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": gpus,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _said(command: list[str]) -> str | None:
    """Returns what a program prints; ``None`` if it is not there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
