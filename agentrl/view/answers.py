"""Answers to the page's questions about the shown runs, as plain data.

Guarantees: one function for each question, used by the server and by static copies alike; a text longer than
:data:`MOST_TEXT` characters comes in part, with its length, and whole only when it is asked for.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.config.errors import UserError
from agentrl.core.images import shown_text
from agentrl.core.redacted import redacted
from agentrl.core.trainer_logprobs import read_gaps
from agentrl.observe.metric_glossary import described
from agentrl.view import evaluations
from agentrl.view.episode_files import KINDS, episode_file
from agentrl.view.episode_row import is_episode, is_sampled
from agentrl.view.findings import Findings
from agentrl.view.group_advantages import advantages, counted_members
from agentrl.view.search_query import HELP
from agentrl.view.shown_runs import ShownRun
from agentrl.view.token_ledger import Tokenizers, ledger

MOST_TEXT = 40_000  # characters of one message that are sent at once
MOST_COLUMNS = 60  # curves of one request
MOST_DIGITS = 15  # of a whole number in a question


class Answers:
    """Answers of the shown runs.

    Args:
        runs: The shown runs.
    """

    def __init__(self, runs: list[ShownRun]) -> None:
        self.runs = {run.key: run for run in runs}
        self._tokenizers = Tokenizers()
        self._findings = Findings()

    def run(self, key: str) -> ShownRun:
        """Returns a shown run.

        Raises:
            UserError: It is not shown.
        """
        if key not in self.runs:
            raise UserError(f"no run {key!r} is shown; shown are: {', '.join(self.runs)}")
        return self.runs[key]

    def list_runs(self) -> dict[str, Any]:
        """Lists the runs."""
        return {"runs": [run.summary() for run in self.runs.values()], "search_help": HELP}

    def overview(self, key: str) -> dict[str, Any]:
        """Returns what the first page of a run shows beside its curves."""
        run = self.run(key)
        run.history.update()
        names = run.history.names()
        latest = run.history.latest()
        return {
            "run": run.summary(),
            "metrics": [{**described(name), "name": name, "latest": latest.get(name)} for name in names],
            "episodes": {kind: self._episodes(run, kind) for kind in KINDS},
            "config": redacted(run.config()),
        }

    def _episodes(self, run: ShownRun, kind: str) -> dict[str, Any]:
        return {"bytes": episode_file(run.folder, kind).size(), "metrics": run.index.metric_names(kind)} | {
            "choices": run.index.choices(kind)
        }

    def findings(self, key: str) -> dict[str, Any]:
        """Returns what ``agentrl doctor`` says of a run."""
        return self._findings.of(self.run(key).folder)

    def curves(self, key: str, names: list[str]) -> dict[str, Any]:
        """Returns some metrics as columns over the steps."""
        run = self.run(key)
        run.history.update()
        return {"columns": run.history.columns(names[:MOST_COLUMNS])}

    def episodes(self, key: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns a part of the table of episodes."""
        sort = query.get("sort") or "-place"
        page = self.run(key).index.page(
            query.get("kind", "train"),
            query.get("q", ""),
            sort=sort.lstrip("-"),
            descending=sort.startswith("-"),
            offset=whole(query.get("offset", "0")),
            limit=whole(query.get("limit", "100")),
        )
        return dict(vars(page))

    def episode(self, key: str, kind: str, place: int) -> dict[str, Any]:
        """Returns an episode: its row's group, its task and its messages, without the tokens."""
        run = self.run(key)
        record = _record(run, kind, place)
        rows = run.index.members(kind, str(record.get("group_id")))
        values, said = advantages(rows, run.config()) if kind == "train" else ([None] * len(rows), "")
        own = next((at for at, row in enumerate(rows) if row["place"] == place), None)
        return {
            **{name: value for name, value in record.items() if name != "trajectories"},
            "place": place,
            "row": None if own is None else rows[own],
            "advantage": None if own is None else values[own],
            "advantage_said": said,
            "siblings": [row["place"] for row in rows],
            "roles": {
                role: {
                    "nodes": [_node(nodes, index) for index in range(len(nodes))],
                    "tools": trajectory.get("tools") or [],
                }
                for role, trajectory in (record.get("trajectories") or {}).items()
                for nodes in [trajectory.get("nodes") or []]
            },
        }

    def tokens(self, key: str, kind: str, place: int) -> dict[str, Any]:
        """Returns the ledger of an episode's tokens."""
        run = self.run(key)
        record = _record(run, kind, place)
        rows = run.index.members(kind, str(record.get("group_id")))
        trained = next((row["trained"] for row in rows if row["place"] == place), None)
        pieces, special, said = self._tokenizers.of_run(run.folder, run.config())
        gaps = read_gaps(run.folder, record) if kind == "train" else {}
        shown = ledger(record, pieces, special, trained if kind == "train" else None, gaps)
        return {**shown, "tokenizer": said, "as_text": pieces is not None}

    def text(self, key: str, kind: str, place: int, role: str, node: int) -> dict[str, Any]:
        """Returns the whole text of one message."""
        record = _record(self.run(key), kind, place)
        try:
            nodes = record["trajectories"][role]["nodes"]
            message = _message(nodes, node)
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"the episode has no message {node} of the role {role!r}") from error
        return {"text": shown_text(message.get("content")), "reasoning": message.get("reasoning_content") or ""}

    def group(self, key: str, kind: str, group_id: str) -> dict[str, Any]:
        """Returns the members of a group with their advantages."""
        run = self.run(key)
        rows = run.index.members(kind, group_id)
        if not rows:
            raise UserError(f"{run.key} has no group {group_id!r} of kind {kind}, of the episodes read so far")
        values, said = advantages(rows, run.config()) if kind == "train" else ([None] * len(rows), "")
        counted = set(counted_members(rows))
        records = [_record(run, kind, row["place"]) for row in rows]
        members = [
            {**row, "advantage": value, "counted": at in counted, "conversation": _sampled(record)}
            for at, (row, value, record) in enumerate(zip(rows, values, records, strict=True))
        ]
        return {"members": members, "said": said, "task": records[0].get("task") or {}}

    def evaluations(self, key: str) -> dict[str, Any]:
        """Returns the evaluations of a run."""
        return {"reports": evaluations.reports(self.run(key).folder)}

    def compare_evaluations(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Compares two evaluations task by task."""
        first, second = (
            (self.run(query.get(f"run{n}", "")).folder, query.get(f"name{n}", "")) for n in (1, 2)
        )  # fmt: skip
        return evaluations.compared(first, second)

    def task(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns the episodes of one task in one run, the newest first, each with its conversation."""
        run, kind = self.run(query.get("run", "")), query.get("kind", "eval")
        limit = whole(query.get("limit", "8"))
        page = run.index.page(kind, query.get("q", ""), limit=limit, task=query.get("task", ""))
        found = [{**row, "conversation": _sampled(_record(run, kind, row["place"]))} for row in page.rows]
        return {"episodes": found, "total": page.total}


def whole(text: str) -> int:
    """Returns the number that a question names.

    Raises:
        UserError: It is no whole number, or one that nothing has so many of.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise UserError(f"{text[:80]!r} is no whole number of at most {MOST_DIGITS} digits")
    return int(text)


def _record(run: ShownRun, kind: str, place: int) -> dict[str, Any]:
    """Reads an episode.

    Raises:
        UserError: None begins there, or the line has not the shape of one.
    """
    record = episode_file(run.folder, kind).read(place)
    if not is_episode(record):
        raise UserError(f"{run.key}: the line at byte {place} is no episode, or one of another version of agentrl")
    return record


def _message(nodes: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Returns a node's message; one that several conversations share stands in the first of them."""
    message = nodes[index].get("message") or {}
    same = message.get("same_as")
    return nodes[same].get("message") or {} if same is not None and "role" not in message else message


def _node(nodes: list[dict[str, Any]], index: int) -> dict[str, Any]:
    node = nodes[index]
    message = dict(_message(nodes, index))
    text = shown_text(message.pop("content", None))
    thought = str(message.pop("reasoning_content", None) or "")
    kept = ("parent", "finish_reason", "reward", "follows", "at", "tools", "sampling")
    return {
        **{name: node.get(name) for name in kept},
        **{"message": message, "text": text[:MOST_TEXT], "length": len(text)},
        **{"reasoning": thought[:MOST_TEXT], "reasoning_length": len(thought)},
        "sampled": is_sampled(node),
        "tokens": len(node.get("token_ids") or ()),
        "repeated": "same_as" in (node.get("message") or {}),
    }


def _sampled(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages from the last one before the first answer on, each in short."""
    found = []
    for role, trajectory in (record.get("trajectories") or {}).items():
        nodes = trajectory.get("nodes") or []
        first = next((at for at, node in enumerate(nodes) if is_sampled(node)), len(nodes))
        for index in range(max(0, first - 1), len(nodes)):
            message = _message(nodes, index)
            text = shown_text(message.get("content"))
            found.append(
                {
                    "of": role,
                    "role": message.get("role"),
                    "text": text[:4000],
                    "length": len(text),
                    "calls": message.get("tool_calls") or [],
                    "sampled": is_sampled(nodes[index]),
                }
            )
    return found
