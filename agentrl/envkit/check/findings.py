"""The checker's report: findings, each with its source line, its harm and its remedy.

Guarantees: a finding's ``check`` is a key of :data:`~agentrl.envkit.check.rules.RULES`, stable between versions; each
rule of a report either has findings, or is in ``passed``, or in ``skipped`` with a reason.
"""

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """Severity of a finding."""

    ERROR = "error"  # episodes fail, or teach something wrong
    WARNING = "warning"  # costs speed, or hides errors
    HINT = "hint"  # may be meant so


@dataclass(frozen=True)
class Finding:
    """A fault of an environment.

    Attributes:
        check: Id of the rule, such as ``reward-range``.
        level: Severity.
        message: The observed behavior.
        where: Source line, such as ``file.py:12 Class.step``; empty if unknown.
        why: Harm to training.
        mend: Remedy.
    """

    check: str
    level: Level
    message: str
    where: str
    why: str
    mend: str


@dataclass(frozen=True)
class Report:
    """Result of a check.

    Attributes:
        name: Name of the environment.
        findings: All findings, the most severe first.
        passed: Rules that were checked and met.
        skipped: Rules that could not be checked, with the reason.
        numbers: Numbers of episodes, steps and cancelled awaits, lowest and highest reward, and seconds.
    """

    name: str
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    skipped: dict[str, str]
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.of(Level.ERROR)

    def of(self, level: Level) -> tuple[Finding, ...]:
        """Returns the findings of one level."""
        return tuple(finding for finding in self.findings if finding.level is level)

    def strict(self) -> "Report":
        """Returns a copy of the report in which warnings are errors."""
        raised = {Level.WARNING: Level.ERROR}
        return replace(self, findings=tuple(replace(f, level=raised.get(f.level, f.level)) for f in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return {**asdict(self), "ok": self.ok}
