"""What a reward is compared with: the key of the baseline that an episode's role has."""

from collections.abc import Iterable
from typing import Literal

from agentrl.config.errors import DataError
from agentrl.core.episode import EpisodeBase, Task, tag_of

Baseline = Literal["role", "group", "tag"]

BASELINE_FORMULAS = {
    "role": "",
    "group": "group = all roles of one task's episodes",
    "tag": "group = the batch's episodes whose tasks have one tag, each role by itself",
}


def baseline_key(episode: EpisodeBase, role: str, baseline: Baseline) -> tuple[str, ...]:
    """Returns the key of a role's baseline: rewards with the same key are compared with each other.

    Args:
        episode: The episode.
        role: One of its roles.
        baseline: The recipe's ``trainer.baseline``: ``role``, one role in one group; ``group``, all roles of a group;
            ``tag``, one role in all episodes of the batch whose tasks have the same tag.

    Raises:
        ValueError: The baseline is ``tag``, and the episode's task has none.
    """
    if baseline == "group":
        return (episode.group_id,)
    if baseline == "role":
        return (episode.group_id, role)
    if episode.tag is None:
        raise ValueError(missing_tag(episode.task_id))
    return (episode.tag, role)


def check_tags(tasks: Iterable[Task], baseline: Baseline) -> None:
    """Checks that each task has a tag if the baseline needs one.

    Raises:
        DataError: A task has none.
    """
    if baseline != "tag":
        return
    for task in tasks:
        if tag_of(task.data) is None:
            raise DataError(missing_tag(task.id))


def missing_tag(task_id: str) -> str:
    """Returns the message for a task without a tag."""
    return (
        f"trainer.baseline=tag compares episodes whose tasks have one tag, but task {task_id} has none: its row needs "
        "the column tag with a text"
    )
