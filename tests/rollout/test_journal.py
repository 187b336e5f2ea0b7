"""The journal of a run that was resumed."""

from pathlib import Path

from agentrl.rollout.journal import Journal
from agentrl.rollout.journal_proof import valid_outcomes


def test_a_resume_voids_the_groups_of_the_steps_that_it_repeats_whatever_became_of_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path, episodes=False)
    for draw, task in enumerate("abcdefg"):
        journal.admitted(draw=draw, task=task, seed=draw, version=0)
    journal.group("trained", draw=0, task="a", step=0)
    journal.group("filtered", draw=1, task="b", step=1, reason="uniform rewards")
    journal.group("trained", draw=2, task="c", step=1)
    cut = journal.cut(2)
    journal.group("failed", draw=3, task="d", step=2, reason="0 of 2 episodes usable")  # after the checkpoint
    journal.group("filtered", draw=4, task="e", step=2, reason="uniform rewards")
    journal.group("trained", draw=5, task="f", step=2)
    journal.group("cancelled", draw=6, task="g", step=3, reason="end of the run")
    journal.resumed(2, cut, again=[3, 4, 5, 6], held=[])
    journal.admitted(draw=3, task="d", seed=3, version=2)
    journal.group("trained", draw=3, task="d", step=2)
    journal.close()
    assert [(r["draw"], r["outcome"], r["step"]) for r in valid_outcomes(tmp_path)] == [
        (0, "trained", 0),
        (1, "filtered", 1),
        (2, "trained", 1),
        (3, "trained", 2),
    ]
