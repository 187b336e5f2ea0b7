"""Reads an episode's record into the row that the table shows, sorts and filters.

Guarantees: pure; a record of an older version, or one that lacks keys, gives a row in which what it does not say is
``None``; a number is counted from the record's own tokens and messages, or what an API told of them, never estimated.
What has not the shape of an episode at all is no row.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import orjson

from agentrl.core.episode import FAILURES
from agentrl.core.images import shown_text
from agentrl.evaluate.answers import kind_of

LARGEST = 1 << 62  # a whole number that the index holds
SNIPPET = 240  # characters of the question and of the answer in the table
Record = Mapping[str, Any]


class EpisodeRow(NamedTuple):
    """A line of the table of episodes.

    Attributes:
        task: Id of the task.
        group_id: Name of the group.
        member: Position in the group.
        tag: Kind of the task.
        version: Policy version that was served at the start.
        oldest: Oldest policy version that sampled a token.
        reward: Reward; ``None`` without one.
        stop: Stop reason.
        failed: Whether it has no reward that counts.
        turns: Number of sampled messages.
        tokens: Number of sampled tokens, as the API told it where it returned no ids; ``None`` if it did not.
        context: Number of all tokens of all its messages.
        calls: Number of tool calls in sampled messages.
        seconds: Duration.
        started: Time of its start, seconds since 1970.
        eval_step: Step of the evaluation; ``None`` in training.
        attempt: Number of earlier attempts.
        retried: Whether it was made again and counts for nothing.
        error: Last line of its error.
        metrics: The environment's numbers, as a JSON object.
        question: Beginning of the last message before the first answer.
        answer: Beginning of the last sampled message.
        silent: Kinds of its answers that say nothing, see :class:`~agentrl.evaluate.answers.Kind`.
        text: All its texts, folded, for the search.
    """

    task: str | None
    group_id: str | None
    member: int | None
    tag: str | None
    version: int | None
    oldest: int | None
    reward: float | None
    stop: str | None
    failed: bool
    turns: int
    tokens: int | None
    context: int
    calls: int
    seconds: float | None
    started: float | None
    eval_step: int | None
    attempt: int
    retried: bool
    error: str
    metrics: str
    question: str
    answer: str
    silent: str
    text: str


def row_of(record: Record) -> EpisodeRow | None:
    """Reads a record; ``None`` for one that has not the shape of an episode.

    Args:
        record: A line of ``episodes.jsonl`` or ``eval-episodes.jsonl``, parsed.
    """
    if not is_episode(record):
        return None
    nodes = list(nodes_of(record))
    sampled = [node for node in nodes if is_sampled(node)]
    ids = sum(sum(node.get("loss_mask") or ()) for node in sampled)
    versions = [v for node in sampled if (v := _least(node.get("versions") or ())) is not None]
    error = str(record.get("error") or "").strip().splitlines()
    reward, stop = _number(record.get("reward")), _name(record.get("stop_reason"))
    return EpisodeRow(
        task=_name(record.get("task_id")),
        group_id=_name(record.get("group_id")),
        member=_whole(record.get("index")),
        tag=_name(record.get("tag")),
        version=_whole(record.get("version")),
        oldest=_whole(min(versions, default=None)),
        reward=reward,
        stop=stop,
        failed=reward is None or stop in FAILURES,
        turns=len(sampled),
        tokens=ids if ids or not sampled else _told(record),
        context=sum(len(node.get("token_ids") or ()) for node in nodes),
        calls=sum(len((node.get("message") or {}).get("tool_calls") or ()) for node in sampled),
        seconds=_number(record.get("seconds")),
        started=_seconds(record.get("started")),
        eval_step=_whole(record.get("eval_step")),
        attempt=_whole(record.get("attempt")) or 0,
        retried=bool(record.get("retried")),
        error=error[-1][:SNIPPET] if error else "",
        metrics=orjson.dumps(_numbers(record.get("metrics"))).decode(),
        question=_question(nodes),
        answer=_said(sampled[-1])[:SNIPPET] if sampled else "",
        silent=" ".join(sorted(set(_silent(sampled)))),
        text="\n".join(_texts(record, nodes)).casefold(),
    )


def _told(record: Record) -> int | None:
    """Returns the number of sampled tokens that an API told; ``None`` unless it told that of each call."""
    told = 0
    for trajectory in (record.get("trajectories") or {}).values():
        asked = set()  # prompts: of a call's several answers the first one has the number
        for node in filter(is_sampled, trajectory.get("nodes") or ()):
            usage = node.get("usage")
            count = _whole(usage.get("completion")) if isinstance(usage, Mapping) else None
            if count is None and node.get("parent") not in asked:
                return None
            asked.add(node.get("parent"))
            told += count or 0
    return told


def is_episode(record: Record) -> bool:
    """Whether a record has the shape of an episode: a key of one, and messages by role that are objects."""
    by_role = record.get("trajectories") or {}
    if not any(name in record for name in ("group_id", "task_id", "reward", "trajectories")):
        return False
    if not isinstance(by_role, Mapping) or not all(isinstance(one, Mapping) for one in by_role.values()):
        return False
    lists = [one.get("nodes") or [] for one in by_role.values()]
    return all(isinstance(nodes, list) and all(map(_is_message, nodes)) for nodes in lists)


def _is_message(node: Any) -> bool:
    tokens = ("token_ids", "loss_mask", "logprobs", "versions")
    return (
        isinstance(node, Mapping)
        and isinstance(node.get("message") or {}, Mapping)
        and isinstance((node.get("message") or {}).get("tool_calls") or [], list)
        and all(isinstance(node.get(name) or [], list) for name in tokens)
    )


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) < LARGEST else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < LARGEST else None


def _name(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)


def _numbers(metrics: Any) -> dict[str, float]:
    found = metrics if isinstance(metrics, Mapping) else {}
    return {name: number for name, value in found.items() if (number := _number(value)) is not None}


def _silent(sampled: list[dict[str, Any]]) -> Iterator[str]:
    for node in sampled:
        if node.get("finish_reason") is not None:
            kind = kind_of(str(node["finish_reason"]), node.get("message") or {})
            if kind is not None:
                yield kind.value


def nodes_of(record: Record) -> Iterator[dict[str, Any]]:
    """Yields the messages of all roles, as they are stored."""
    for trajectory in (record.get("trajectories") or {}).values():
        yield from trajectory.get("nodes") or ()


def is_sampled(node: Record) -> bool:
    """Whether a stored message is an answer of the model; text-mode records have no tokens to tell by."""
    return node.get("finish_reason") is not None or any(node.get("loss_mask") or ())


def _said(node: Record) -> str:
    """Returns what a message says in one text: content, else its calls, else its reasoning."""
    message = node.get("message") or {}
    said = shown_text(message.get("content"))
    if not said.strip():
        said = " ".join(_calls(message)) or str(message.get("reasoning_content") or "")
    return said.strip()


def _calls(message: Record) -> list[str]:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [f"{function.get('name')}({function.get('arguments')})" for function in functions]


def _question(nodes: list[dict[str, Any]]) -> str:
    asked = ""
    for node in nodes:
        if is_sampled(node):
            break
        asked = _said(node) or asked
    return asked[:SNIPPET]


def _texts(record: Record, nodes: list[dict[str, Any]]) -> Iterator[str]:
    yield str(record.get("task_id") or "")
    if record.get("error"):
        yield str(record["error"])
    for node in nodes:
        message = node.get("message") or {}
        if message.get("reasoning_content"):
            yield str(message["reasoning_content"])
        if message.get("content"):
            yield shown_text(message["content"])
        yield from _calls(message)


def _least(versions: Any) -> int | None:
    """Returns the lowest version of sampled tokens; tokens that nothing sampled have -1."""
    known = set(versions) - {-1}
    return min(known, default=None)


def _seconds(started: Any) -> float | None:
    if not isinstance(started, str):
        return None
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return None
