"""Makes an environment in a new Python process from its path and settings, and plays one episode there.

Guarantees: the process has the same import path, another hash seed, and a time limit; its output is captured, and the
last line is shown if it fails.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from agentrl.envkit.make import make

SECONDS = 120.0  # time limit to import agentrl, make the environment and play an episode
_HASH_SEED = "20011"  # differs from this process's: the order of sets must not matter
_BEGIN = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from agentrl.envkit.check.fresh import answer
answer(sys.stdin.buffer, sys.argv[1])
"""


class FreshProcessError(Exception):
    """Raised when the process failed; the text is the last line of its output."""


def in_new_process(order: bytes) -> list[Any]:
    """Plays one episode in a new process.

    Args:
        order: Pickled ``(entry_point, kwargs, seed, task, actions)``; without ``actions`` the environment is only made.

    Returns:
        The first observation, then observation, reward, terminated and truncated of each step; empty without actions.

    Raises:
        FreshProcessError: The process failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder, "result"), Path(folder, "said")
        code = _run([sys.executable, "-c", _BEGIN, str(result)], pickle.dumps(sys.path) + order, said)
        if code == 0 and result.exists():
            return pickle.loads(result.read_bytes())
        lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code is None:
        raise FreshProcessError(f"it took over {SECONDS:g} s")
    raise FreshProcessError(lines[-1][:300] if lines else f"it said nothing and gave code {code}")


def _run(command: list[str], given: bytes, said: Path) -> int | None:
    """Runs a command and kills its process group; returns the exit code, or ``None`` after a timeout."""
    variables = {**os.environ, "PYTHONHASHSEED": _HASH_SEED}
    with said.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=variables, start_new_session=True
        )
        try:
            process.communicate(given, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def answer(stdin: Any, result: str) -> None:
    """Makes the environment, plays the episode and writes the result; runs in the new process."""
    sys.excepthook = _leave  # otherwise Python would wait for threads that the environment left running
    entry_point, kwargs, seed, task, actions = pickle.load(stdin)
    env = make(entry_point, **kwargs)

    async def play() -> list[Any]:
        said: list[Any] = [(await env.reset(seed=seed, options=task))[0]]
        for action in actions:
            said.append((await env.step(action))[:4])
            if said[-1][2] or said[-1][3]:
                break
        said = pickle.loads(pickle.dumps(said))
        await env.close()
        return said

    Path(result).write_bytes(pickle.dumps(asyncio.run(play()) if actions else []))
    os._exit(0)


def _leave(*error: Any) -> None:
    traceback.print_exception(*error)
    sys.stderr.flush()
    os._exit(1)
