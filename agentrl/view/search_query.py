"""Reads the search language of the table of episodes into an SQL condition.

Guarantees: what was typed is only ever a parameter of the SQL; an unknown field, a number that is none or a stray
operator is refused with what would be right. ``reward<0.5 stop:length tag:hard -is:failed "off by one"`` means all of
it at once: conditions, and texts that must all be in the episode, whatever their case.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.errors import UserError
from agentrl.core.registry import closest, nearest
from agentrl.evaluate.answers import Kind

NUMBERS = {
    "reward": "e.reward",
    "length": "e.tokens",
    "tokens": "e.tokens",
    "context": "e.context",
    "turns": "e.turns",
    "calls": "e.calls",
    "version": "e.version",
    "age": "(t.step - e.oldest)",
    "trained": "t.step",
    "seconds": "e.seconds",
    "step": "e.eval_step",
    "attempt": "e.attempt",
    "index": "e.member",
    "started": "e.started",
}
"""Name of a numeric field -> its SQL."""
TEXTS = {"stop": "e.stop", "tag": "e.tag", "task": "e.task", "group": "e.group_id"}
"""Name of a field with a text -> its SQL."""
STATES = {
    **{"failed": "e.failed", "retried": "e.retried", "trained": "(t.step IS NOT NULL)"},
    **{kind.value: f"(instr(e.silent, '{kind.value}') > 0)" for kind in Kind},
}
"""Word after ``is:`` -> its SQL."""
HELP = (
    "reward<0.5  length>=100  turns=3  version:10..20  age>1  accuracy=1  stop:length  tag:hard  task:train/17  "
    'group:g4  is:failed  text:apples  "an exact text"  -stop:length'
)
_TERM = re.compile(r'(?P<no>-?)(?:(?P<name>[\w./-]*?\w)(?P<op><=|>=|!=|[<>=:]))?(?P<value>"[^"]*"?|\S*)')
_TYPO = 0.7  # likeness of a word before a colon to a field, from which on it is taken for one
_RANGE = re.compile(r"(?P<low>[^.]*(?:\.\d+)?)\.\.(?P<high>.*)")


@dataclass
class Condition:
    """An SQL condition over ``episodes e``, ``trained t`` and ``texts x``, and its parameters.

    Attributes:
        parts: Conditions that must all hold.
        values: Parameters, in order.
        by_text: Whether the texts are searched.
    """

    parts: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    by_text: bool = False

    @property
    def sql(self) -> str:
        """The condition; ``1`` if everything is wanted."""
        return " AND ".join(self.parts) or "1"

    def add(self, sql: str, *values: Any, negated: bool = False) -> None:
        """Add a condition; one that cannot be judged for want of a value does not hold, and its negation does."""
        self.parts.append(f"NOT coalesce({sql}, 0)" if negated else sql)
        self.values += values


def parse(query: str, metrics: Collection[str] = ()) -> Condition:
    """Reads a query.

    Args:
        query: Text that was typed.
        metrics: Names of the environment's metrics, which are numeric fields as well.

    Raises:
        UserError: The query cannot be read.
    """
    found = Condition()
    for match in _TERM.finditer(query):
        if not match[0]:
            continue
        negated, name, op = bool(match["no"]), match["name"], match["op"]
        value = match["value"]
        text = value.strip('"') if value.startswith('"') else value
        if name is None or name == "text" or (op == ":" and not _is_field(name, metrics)):  # "Note: this" is a text
            whole = text if name in (None, "text") else f"{name}{op}{text}"
            if name not in (None, "text"):
                _check_typo(name, whole, metrics)
            if negated and not whole:
                whole, negated = "-", False
            found.add("instr(x.text, ?)", whole.casefold(), negated=negated)
            found.by_text = True
        elif name == "is":
            if text not in STATES:
                raise UserError(f"is:{text} is unknown; want one of: {', '.join(STATES)}")
            found.add(STATES[text], negated=negated)
        elif name in TEXTS:
            _text(found, name, op, text, negated)
        else:
            _number(found, _column(name, metrics), name, op, text, negated)
    return found


def _is_field(name: str, metrics: Collection[str]) -> bool:
    return name == "is" or name in NUMBERS or name in TEXTS or name in metrics


def _check_typo(name: str, whole: str, metrics: Collection[str]) -> None:
    """Refuses what is nearly a field, which would find nothing as a text."""
    meant = closest(name, [*NUMBERS, *TEXTS, "is", "text", *sorted(metrics)], _TYPO)
    if meant is not None:
        raise UserError(f'no field {name!r}, did you mean {meant!r}? For the text write "{whole}" in quotes')


def _column(name: str, metrics: Collection[str]) -> tuple[str, tuple[Any, ...]]:
    if name in NUMBERS:
        return NUMBERS[name], ()
    if name in metrics:
        return "json_extract(e.metrics, ?)", (metric_path(name),)
    known = [*NUMBERS, *TEXTS, *sorted(metrics)]
    hint = nearest(name, known)
    raise UserError(f"no field {name!r}{hint or '.'} Fields: {', '.join(known)}")


def metric_path(name: str) -> str:
    """Returns the JSON path of a metric, for ``json_extract``."""
    quoted = name.replace('"', "")
    return f'$."{quoted}"'


def _text(found: Condition, name: str, op: str, text: str, negated: bool) -> None:
    if op not in (":", "=", "!="):
        raise UserError(f"{name} is a text: write {name}:{text or 'VALUE'}, not {name}{op}{text}")
    if not text:
        raise UserError(f"{name}{op} needs a value")
    found.add(f"{TEXTS[name]} = ?", text, negated=negated != (op == "!="))


def _number(
    found: Condition, column: tuple[str, tuple[Any, ...]], name: str, op: str, text: str, negated: bool
) -> None:
    sql, values = column
    span = _RANGE.fullmatch(text) if op in (":", "=") else None
    if span:
        low, high = _as_number(name, span["low"]), _as_number(name, span["high"])
        found.add(f"{sql} BETWEEN ? AND ?", *values, low, high, negated=negated)
        return
    sign = {":": "=", "!=": "!="}.get(op, op)
    found.add(f"{sql} {sign} ?", *values, _as_number(name, text), negated=negated)


def _as_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"{name} is a number: {text!r} is none; write {name}<0.5 or {name}:0.2..0.8") from error
