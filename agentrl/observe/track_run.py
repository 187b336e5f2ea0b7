"""Process that sends a run's metrics and sample episodes to trackers, while the run goes on or afterwards.

Guarantees: a tracker that fails, hangs or is slow costs the run nothing: it reads the run's files, and ends by itself
when it was told to (SIGTERM) and all is sent, or with its parent. Each record is sent once, in order; a tracker that
raised is left out from then on, which the log says. Of a run that resumes, nothing is sent before the steps that it
repeats are taken out of its files.
"""

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

from agentrl.core.images import shown_text
from agentrl.core.redacted import redacted
from agentrl.host.process import die_with_parent
from agentrl.observe.sinks import METRICS_FILE, MetricsTail
from agentrl.observe.trackers import TRACKERS, Tracker

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
SAMPLES = 8  # episodes in each table
TABLE_EVERY = 10  # steps between two tables
SHOWN = 2000  # characters of a question or an answer in a table
EPISODES = "episodes.jsonl"


class Follower:
    """Follows a run's files and sends what is new.

    Args:
        run_dir: Folder of the run.
        trackers: Trackers by name.
    """

    def __init__(self, run_dir: Path, trackers: Mapping[str, Tracker]) -> None:
        self._run_dir = run_dir
        self._trackers = dict(trackers)
        self._tail = MetricsTail(run_dir / METRICS_FILE, skip=False)
        self._table_at = -TABLE_EVERY

    def send(self) -> None:
        """Send what was written since the last call."""
        for record in self._tail.new():
            step = int(record.get("step") or 0)
            values = {name: float(value) for name, value in record.items() if _is_metric(name, value)}
            self._each(lambda one, step=step, values=values: one.metrics(step, values))
            if step - self._table_at >= TABLE_EVERY and (rows := sample_rows(self._run_dir / EPISODES, step)):
                self._table_at = step
                self._each(lambda one, step=step, rows=rows: one.episodes(step, rows))

    def close(self) -> None:
        """Send the rest, and close the trackers."""
        self.send()
        self._each(lambda one: one.close())

    def _each(self, call: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            with _contained(name, "failed, and gets nothing any more", partial(self._trackers.pop, name, None)):
                call(tracker)


@contextmanager
def _contained(name: str, what: str, failed: Callable[[], Any]) -> Iterator[None]:
    """Keeps a failure of somebody else's package from the others: the log has it, with its traceback."""
    try:
        yield
    except Exception:  # no account, no network, an unknown version: whatever it raises
        log.exception("tracker %s %s", name, what)
        failed()


def _is_metric(name: str, value: Any) -> bool:
    return name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)


def sample_rows(file: Path, step: int) -> list[dict[str, Any]]:
    """Returns the newest episodes as rows of a table.

    Args:
        file: ``episodes.jsonl`` of a run; may be missing.
        step: Step of the rows.
    """
    rows = []
    for line in _last_lines(file, SAMPLES):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # a damaged line: the others are shown
        nodes = [node for one in (record.get("trajectories") or {}).values() for node in one["nodes"]]
        sampled = [node for node in nodes if any(node.get("loss_mask") or ())]
        asked = nodes[: nodes.index(sampled[0])] if sampled else nodes
        rows.append(
            {
                "step": step,
                "task": record.get("task_id"),
                "reward": record.get("reward"),
                "stop": record.get("stop_reason"),
                "tokens": sum(sum(node["loss_mask"]) for node in sampled),
                "question": _text(asked),
                "answer": _text(sampled),
            }
        )
    return rows


def _last_lines(file: Path, count: int) -> list[bytes]:
    """Returns the last whole lines of a file; those that are longer than a block are left out."""
    if not file.is_file():
        return []
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - (4 << 20)))
        block = opened.read()
    lines = block[: block.rfind(b"\n") + 1].splitlines()
    return (lines if size <= 4 << 20 else lines[1:])[-count:]


def _text(nodes: Sequence[Mapping[str, Any]]) -> str:
    message = nodes[-1]["message"] if nodes else {}
    return (
        (shown_text(message.get("content")) or json.dumps(message.get("tool_calls") or ""))[:SHOWN] if message else ""
    )


def started(names: Sequence[str], run_dir: Path) -> dict[str, Tracker]:
    """Starts the trackers of a run; one that cannot be started is left out, which the log says."""
    file = run_dir / "config.json"
    settings = redacted(json.loads(file.read_text())) if file.is_file() else {}
    found: dict[str, Tracker] = {}
    for name in names:
        with _contained(name, "cannot be started", lambda: None):
            found[name] = TRACKERS[name](run_dir.name, run_dir, settings)
    return found


def main(parent_pid: int, run_dir: Path, names: Sequence[str]) -> None:
    """Follow a run until SIGTERM, then send the rest.

    Args:
        parent_pid: Process to end with; 0 to send what there is and end.
        run_dir: Folder of the run.
        names: Names of the trackers.
    """
    ended = not parent_pid

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True

    if parent_pid:
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which then sends SIGTERM
        die_with_parent(parent_pid)
    before = _state(run_dir / METRICS_FILE)  # of a run that was resumed: with steps that it repeats
    follower = Follower(run_dir, started(names, run_dir))
    while not ended:
        if _state(run_dir / METRICS_FILE) != before:
            before = None
            follower.send()
        time.sleep(POLL_SECONDS)
    follower.close()


def _state(file: Path) -> tuple[int, int] | None:
    """Returns a file's number and size; ``None`` without one."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
