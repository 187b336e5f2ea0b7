"""Makes an environment in a new Python process from its path and settings, and plays one episode there.

Guarantees: the process imports from the same folders as this one, has other hashes of strings, and ends in bounded
time; what it prints is kept, and shown only where it fails.
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

SECONDS = 120.0  # for a new Python to import agentrl, make the environment and play an episode
_HASH_SEED = "20011"  # another than this process has: the order of sets must not matter
_BEGIN = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from agentrl.envkit.check.fresh import answer
answer(sys.stdin.buffer, sys.argv[1])
"""


class FreshProcessError(Exception):
    """The process failed; its text is the last line it said."""


def in_new_process(order: bytes) -> list[Any]:
    """Plays one episode in a new process.

    Args:
        order: Pickled ``(entry_point, kwargs, seed, task, actions)``; no ``actions``: it is only made.

    Returns:
        The first observation, then observation, reward, terminated and truncated of each step; empty if only made.

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
    """The exit code, ``None`` where time was up; no process of its group is left."""
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
    """The new process's part: make, play, and write what came."""
    sys.excepthook = _leave  # Python itself would wait for what the environment has left running
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
