"""Writes the episodes of an evaluation as a Hugging Face dataset on disk.

Guarantees: one row for each episode, whose columns have the same types in all rows: what differs in shape between
tasks (the task's row, messages, metrics) is JSON text. Rows are streamed, so memory does not grow with their number.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.core.extras import install_hint
from agentrl.evaluate.stored import StoredEpisodes


def write_datasets(run_dir: Path, target: Path) -> None:
    """Writes a folder for ``datasets.load_from_disk``.

    Raises:
        UserError: ``datasets`` is not installed, or there are no episodes.
    """
    if not len(StoredEpisodes(run_dir)):
        raise UserError(f"{run_dir} holds no episodes: they were not kept (logging.episodes=false)")
    try:
        from datasets import Dataset, Features, Value
    except ImportError as error:
        raise UserError(f"--to datasets needs the package 'datasets': {install_hint('train')}") from error
    kinds = {
        **dict.fromkeys(("task_id", "tag", "stop_reason", "error", "answer", "task", "messages", "metrics"), "string"),
        **{"index": "int64", "seed": "int64", "reward": "float64", "accuracy": "float64", "seconds": "float64"},
        "failed": "bool",
    }
    features = Features({name: Value(kind) for name, kind in kinds.items()})
    made = Dataset.from_generator(rows, features=features, gen_kwargs={"run_dir": str(run_dir)}, keep_in_memory=False)
    made.save_to_disk(str(target))  # type: ignore[union-attr]


def rows(run_dir: str) -> Iterator[dict[str, Any]]:
    """Yields the rows."""
    for episode in StoredEpisodes(Path(run_dir)):
        yield {
            **{name: getattr(episode, name) for name in ("task_id", "index", "seed", "tag", "error", "answer")},
            **{"stop_reason": str(episode.stop_reason), "failed": episode.failed, "seconds": episode.seconds},
            **{"reward": episode.reward, "accuracy": episode.metrics.get("accuracy")},
            "task": json.dumps(episode.task),
            "messages": json.dumps({role: episode.conversation(role) for role in episode.trajectories}),
            "metrics": json.dumps(episode.metrics),
        }
