"""Runs ``agentrl`` as if packages were not installed, in the process itself and in all its children."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.end_to_end import SECONDS, environment

_BLOCKER = """
import sys
from importlib.machinery import PathFinder

BLOCKED = {names!r}


class Incomplete(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in BLOCKED else super().find_spec(fullname, path, target)


sys.meta_path[:] = [Incomplete if one is PathFinder else one for one in sys.meta_path]
"""


def run_without(
    packages: Iterable[str], arguments: Iterable[str], folder: Path, cwd: Path, typed: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run ``agentrl ARGUMENTS`` without some packages.

    Args:
        packages: Names under which the packages are imported.
        arguments: Arguments of the command.
        folder: Empty folder that the test may write to.
        cwd: Working folder of the command.
        typed: Text on standard input.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_BLOCKER.format(names=sorted(packages)))
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "agentrl", *arguments],
        cwd=cwd, env=env, input=typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
    )  # fmt: skip
