"""The staleness gate against its published arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.staleness import StalenessGate


def test_capacity_matches_the_published_values() -> None:
    assert StalenessGate(2, 4, 1000).capacity() == 12
    assert StalenessGate(2, 4, 1000, version=5, accepted=20).capacity() == 12
    assert StalenessGate(2, 4, 10, running=3).capacity() == 7
    assert StalenessGate(0, 4, 1000, accepted=9).capacity() == -5


def test_recovery_counts_the_batches_of_the_versions_before() -> None:
    gate = StalenessGate(1, 4, 1000, running=3, accepted=99)
    gate.recover(7)
    assert (gate.version, gate.running, gate.accepted, gate.capacity()) == (7, 0, 28, 8)


@given(st.integers(0, 4), st.integers(1, 5), st.lists(st.sampled_from(["start", "keep", "drop", "step"]), max_size=200))
def test_no_group_is_consumed_later_than_the_bound(eta: int, batch: int, events: list[str]) -> None:
    """Whatever happens when, a kept group started at version v is consumed at most eta steps later."""
    gate = StalenessGate(eta, batch, 10_000)
    running: list[int] = []
    kept: list[int] = []
    for event in events:
        if event == "start" and gate.capacity() > 0:
            gate.start()
            running.append(gate.version)
        elif event in ("keep", "drop") and running:
            started = running.pop(0)
            gate.finish(accepted=event == "keep")
            if event == "keep":
                kept.append(started)
        elif event == "step" and len(kept) >= batch:
            consumed, kept = kept[:batch], kept[batch:]
            assert all(gate.version - started <= eta for started in consumed)
            gate.version += 1
