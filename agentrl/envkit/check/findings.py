"""What the checker says: findings, each with its line, its harm and its remedy, and the report that holds them.

Guarantees: a finding's ``check`` is a key of :data:`~agentrl.envkit.check.rules.RULES` and stays the same from version
to version; each rule is in exactly one of a report's three lists: with findings, passed, or skipped with a reason.
"""

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters."""

    ERROR = "error"  # episodes fail, or teach something wrong
    WARNING = "warning"  # costs speed, or hides errors
    HINT = "hint"  # may be meant so


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        check: Id of the rule, such as ``reward-range``.
        level: How much it matters.
        message: What was seen.
        where: ``file.py:12 Class.step``; empty where no line can be named.
        why: What it does to training.
        mend: What to do about it.
    """

    check: str
    level: Level
    message: str
    where: str
    why: str
    mend: str


@dataclass(frozen=True)
class Report:
    """All that a check found.

    Attributes:
        name: What was checked.
        findings: The worst first.
        passed: Rules that were held against the environment and met.
        skipped: Rules that could not be checked, with the reason.
        numbers: Episodes, steps, rewards and seconds.
    """

    name: str
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    skipped: dict[str, str]
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.of(Level.ERROR)

    def of(self, level: Level) -> tuple[Finding, ...]:
        """The findings of one level."""
        return tuple(finding for finding in self.findings if finding.level is level)

    def strict(self) -> "Report":
        """The same with warnings as errors."""
        raised = {Level.WARNING: Level.ERROR}
        return replace(self, findings=tuple(replace(f, level=raised.get(f.level, f.level)) for f in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "ok": self.ok}
