"""Records episodes to disk, one JSON line each.

Guarantees: each line is complete, however many environments and processes write to the file, even after a process
was killed while writing; it is ASCII JSON without line separators inside. Messages are copied at the time of the step.
An episode abandoned before its end has ``"finished": false``. The line is written before ``step`` returns.
"""

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from agentrl.core.environment import Environment, Info
from agentrl.envkit.wrappers.wrapper import StepResult, Wrapper

FILE = "episodes.jsonl"


class RecordEpisodes(Wrapper):
    """Writes each episode to ``folder/episodes.jsonl``.

    A line has ``env`` (id, or class), ``task`` (``None`` for an environment that has none but its seed), ``seed``,
    ``messages`` (observations and actions in order), ``rewards`` (one a step, ``None`` where missing), ``terminated``,
    ``truncated``, ``finished`` and ``metrics``.

    Args:
        env: The inner environment; wrappers outside of this one are not in the record.
        folder: Folder of the file; created if missing.
    """

    def __init__(self, env: Environment[Any, Any], folder: str | os.PathLike[str]) -> None:
        super().__init__(env)
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._episode: dict[str, Any] | None = None

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode; a running one is written as unfinished."""
        self._write()
        observation, info = await super().reset(seed=seed, options=options)
        self._episode = {
            "env": self.spec.id if self.spec is not None else type(self.unwrapped).__name__,
            "task": plain(self.unwrapped.chosen_task or options or None),
            "seed": seed,
            "messages": [],
            "rewards": [],
            "terminated": False,
            "truncated": False,
            "finished": False,
            "metrics": plain(info.get("metrics", {})),
        }
        self._say(observation)
        return observation, info

    async def step(self, action: Any) -> StepResult:
        """Take a step; write the episode if it ended."""
        self._check_running()
        self._say(action)
        result = await super().step(action)
        observation, reward, terminated, truncated, info = result
        self._say(observation)
        episode = self._episode
        if episode is not None:
            episode["rewards"].append(plain(reward))
            episode["metrics"].update(plain(info.get("metrics", {})))
            over = terminated or truncated
            episode.update(terminated=terminated, truncated=truncated, finished=over)
            if over:
                self._write()
        return result

    async def close(self) -> None:
        """Write a running episode as unfinished, and close the environment."""
        try:
            self._write()
        finally:
            await super().close()

    def _say(self, said: Any) -> None:
        if self._episode is not None:
            self._episode["messages"] += [plain(one) for one in (said if isinstance(said, list | tuple) else [said])]

    def _write(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            append_line(self.path, json.dumps(episode))


def append_line(path: Path, line: str) -> None:
    """Append a line to a file that other processes append to as well.

    Args:
        path: File to append to; created if missing.
        line: Text of the line, without newline.
    """
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        half = b""
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            half = b"" if file.read(1) == b"\n" else b"\n"  # a process was killed in the middle of a line
        file.write(half + line.encode("ascii") + b"\n")


def plain(value: Any) -> Any:
    """Copies ``value`` as JSON data; a value that JSON cannot express becomes its ``repr``."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return plain(value.tolist())
    return repr(value)
