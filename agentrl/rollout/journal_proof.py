"""Proves from a run's journal alone that each draw of a task was trained once, or says where it was not.

Guarantees: pure, but for reading the file. A journal passes if its checksums fit, each draw was admitted before it
ended and ended at most once, no draw below the highest one is missing, trained steps follow one another without a gap,
and each resume goes on from a checkpoint with all draws that had not ended there and with none that a step had counted,
those that run again with the same task and seed. The first violation is named with its line.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.rollout.journal_lines import FILE, JournalError, read_journal

Line = tuple[int, dict[str, Any]]  # number in the file, from 1, and record


class Violation(JournalError):
    """The journal shows that a draw was not trained exactly once; the message names the line."""


@dataclass
class Proof:
    """Facts that a journal shows: each draw with its one end, without what resumes made void.

    Attributes:
        admitted: Draw index -> line of its admission.
        ends: Draw index -> line of its end.
        owed: Draw index -> admission that a resume made void, of a draw that was not admitted again yet.
        lines: Number of lines read.
        records: Number of valid records of groups.
        void: Number of records of groups that resumes made void.
        resumes: Number of resumes.
        checkpoint: Step of the latest checkpoint; ``None`` without one.
        steps: Number of trained steps.
    """

    admitted: dict[int, Line] = field(default_factory=dict)
    ends: dict[int, Line] = field(default_factory=dict)
    owed: dict[int, Line] = field(default_factory=dict)
    lines: int = 0
    records: int = 0
    void: int = 0
    resumes: int = 0
    checkpoint: int | None = None
    steps: int = 0

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of draws by how they ended, the most frequent first."""
        return dict(Counter(record["outcome"] for _, record in self.ends.values()).most_common())

    @property
    def running(self) -> list[int]:
        """Draws that were admitted and have not ended."""
        return sorted(self.admitted.keys() - self.ends.keys())

    def text(self) -> str:
        """Says in a few lines what was proved."""
        ends = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items()) or "none"
        said = [
            f"{self.lines} lines, all checksums fit",
            f"{len(self.admitted)} draws, each admitted once; ended, each once: {ends}; {len(self.running)} not ended",
            f"{self.steps} trained steps, none left out"
            + (f"; latest checkpoint after step {self.checkpoint}" if self.checkpoint is not None else ""),
            f"{self.resumes} resumes, which made {self.void} records void",
        ]
        return "\n".join(said)


def prove(run_dir: Path) -> Proof:
    """Reads the journal of a run and proves that each of its draws ended at most once.

    Raises:
        Violation: A draw has two ends, or was lost.
        JournalError: The journal is damaged.
    """
    return prove_records(read_journal(run_dir / FILE).records)


def prove_records(records: list[dict[str, Any]]) -> Proof:
    """Does what :func:`prove` does, for the records of a journal in order."""
    proof = _Prover(records).prove(len(records))
    known = proof.admitted.keys() | proof.owed.keys()
    missing = set(range(max(known, default=-1) + 1)) - known
    if missing:
        raise Violation(f"draw {min(missing)} was never admitted, although later ones were")
    return proof


def valid_outcomes(run_dir: Path) -> list[dict[str, Any]]:
    """Reads how each group of a run ended, in order, without the records that a resume made void.

    Raises:
        JournalError: The journal is damaged, or a draw has two ends.
    """
    return [record for _, record in sorted(prove(run_dir).ends.values(), key=lambda line: line[0])]


class _Prover:
    """Reads records from the first one on; what they prove up to a cut is computed once."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records
        self._cuts: dict[int, Proof] = {}  # line of a checkpoint -> what the lines up to it prove

    def prove(self, count: int) -> Proof:
        """Returns what the first ``count`` lines prove."""
        proof = Proof()
        for line in enumerate(self._records[:count], 1):
            proof = self._resume(line, proof) if line[1]["outcome"] == "resumed" else _take(line, proof)
        proof.lines = count
        return proof

    def _resume(self, line: Line, before: Proof) -> Proof:
        number, record = line
        step, cut = record["step"], record["line"]
        if not 0 < cut < number or self._records[cut - 1] != {"outcome": "checkpoint", "step": step}:
            raise Violation(f"line {number}: a resume after step {step} from line {cut}, which is not its checkpoint")
        if cut not in self._cuts:
            self._cuts[cut] = self.prove(cut)
        proof = copy.deepcopy(self._cuts[cut])
        for draw in (*record["again"], *record["held"]):
            if draw in proof.ends and _counted(proof.ends[draw][1], step):
                earlier, end = proof.ends[draw]
                raise Violation(f"line {number}: draw {draw} goes on, but line {earlier} says {end['outcome']} already")
            if draw not in proof.admitted and draw not in proof.owed:
                raise Violation(f"line {number}: draw {draw} goes on, but was not admitted before line {cut}")
            proof.records -= proof.ends.pop(draw, None) is not None
        for draw in record["again"]:
            if draw in proof.admitted:
                proof.owed[draw] = proof.admitted.pop(draw)
                proof.records -= 1
        lost = proof.admitted.keys() - proof.ends.keys() - set(record["held"])
        if lost:
            raise Violation(f"line {number}: draw {min(lost)} was admitted before line {cut} and does not go on")
        proof.resumes, proof.void = before.resumes + 1, before.void + before.records - proof.records
        return proof


def _take(line: Line, proof: Proof) -> Proof:
    """Adds a record that is no resume to what is proved so far."""
    number, record = line
    outcome = record["outcome"]
    if outcome == "checkpoint":
        if record["step"] != proof.steps:
            raise Violation(f"line {number}: a checkpoint after step {record['step']}, but {proof.steps} are trained")
        proof.checkpoint = record["step"]
        return proof
    proof.records += 1
    draw = record["draw"]
    if outcome == "admitted":
        if draw in proof.admitted:
            raise Violation(f"line {number}: draw {draw} is admitted, and line {proof.admitted[draw][0]} did that")
        before = proof.owed.pop(draw, line)[1]
        if any(before[key] != record[key] for key in ("task", "seed")):
            raise Violation(f"line {number}: draw {draw} is admitted again with another task or another seed")
        proof.admitted[draw] = line
        return proof
    if outcome == "cancelled" and draw in proof.owed:  # the run ended before it was admitted again
        proof.admitted[draw] = proof.owed.pop(draw)
        proof.records += 1
    if draw not in proof.admitted:
        raise Violation(f"line {number}: draw {draw} ended as {outcome} and was not admitted")
    if draw in proof.ends:
        earlier, end = proof.ends[draw]
        raise Violation(f"line {number}: draw {draw} ended as {outcome}; line {earlier} says {end['outcome']} already")
    proof.ends[draw] = line
    if outcome == "trained":
        if record["step"] not in (proof.steps - 1, proof.steps):
            raise Violation(
                f"line {number}: draw {draw} is trained in step {record['step']}, after {proof.steps} steps"
            )
        proof.steps = record["step"] + 1
    return proof


def _counted(end: dict[str, Any], step: int) -> bool:
    """Whether a step before ``step`` counted the group."""
    return end["outcome"] == "trained" or end["step"] < step
