"""Measures the effort of an episode: turns, length, tokens, calls of tools, seconds and cost.

Guarantees: what was not measured is absent and never 0: tokens where neither the server's ids nor the API's usage tell
them, cost without a price, calls of tools where none were offered. Tokens count as often as they were paid for: each
call's prompt anew.
"""

from collections.abc import Iterator

from agentrl.core.episode import Episode, Node, Trajectory
from agentrl.evaluate.prices import Price

MEASURES = (
    *("turns", "answer_chars", "answer_tokens", "prompt_tokens", "cached_tokens", "reasoning_tokens"),
    *("tool_calls", "seconds", "cost"),
)
"""Names of measures, in the order in which they are shown; an environment's metric of such a name goes first."""


def measures_of(episode: Episode, price: Price | None = None) -> dict[str, float]:
    """Returns the measures of an episode by name, see :data:`MEASURES`.

    Args:
        episode: An episode, failed or not: what was sampled before a failure was paid for too.
        price: Price of the model's tokens.
    """
    answers = [node for _, node in _answers(episode)]
    found = {"turns": float(len(answers)), "answer_chars": float(sum(map(_chars, answers)))}
    usage = usage_of(episode)
    for name, count in usage.items():
        found[{"completion": "answer_tokens"}.get(name, f"{name}_tokens")] = float(count)
    calls = sum(len(node.message.get("tool_calls") or ()) for node in answers)
    if calls or any(one.tools for one in episode.trajectories.values()):
        found["tool_calls"] = float(calls)
    found["seconds"] = episode.seconds
    cost = price.of(usage) if price is not None else None
    if cost is not None:
        found["cost"] = cost
    return found


def usage_of(episode: Episode) -> dict[str, int]:
    """Returns the numbers of tokens of all calls of an episode: ``prompt``, ``completion``, ``cached``, ``reasoning``.

    They are the API's own, or of the ids that a server read and sampled; those that not all calls tell are absent.
    """
    if not any(True for _ in _answers(episode)):
        return {"prompt": 0, "completion": 0} if not episode.trajectories else {}
    totals: dict[str, int] = {}
    calls = 0
    told: dict[str, int] = {}
    for trajectory, node in _answers(episode):
        usage = node.usage or _of_ids(trajectory, node)
        if usage is None:
            if _is_first(trajectory, node):
                calls += 1
            continue
        calls += 1
        for name, count in usage.items():
            totals[name] = totals.get(name, 0) + count
            told[name] = told.get(name, 0) + 1
    return {name: total for name, total in totals.items() if told[name] == calls or name in ("cached", "reasoning")}


def _answers(episode: Episode) -> Iterator[tuple[Trajectory, Node]]:
    for trajectory in episode.trajectories.values():
        for node in trajectory.nodes:
            if node.finish_reason is not None or any(node.loss_mask):
                yield trajectory, node


def _is_first(trajectory: Trajectory, node: Node) -> bool:
    """Whether no earlier answer is to the same prompt: several answers of one call share its usage."""
    for other in trajectory.nodes:
        if other is node:
            return True
        if other.parent == node.parent and other.finish_reason is not None:
            return False
    return True


def _of_ids(trajectory: Trajectory, node: Node) -> dict[str, int] | None:
    if not node.token_ids:
        return None
    sampled = sum(node.loss_mask)
    before = [] if node.parent is None else trajectory.path(node.parent)
    read = sum(len(trajectory.nodes[index].token_ids) for index in before) + len(node.token_ids) - sampled
    return {"prompt": read, "completion": sampled}


def _chars(node: Node) -> int:
    text = node.message.get("content")
    return len(text) if isinstance(text, str) else 0
