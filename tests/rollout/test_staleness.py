"""The staleness gate against its published arithmetic, and against what it bounds: the mean, not each group."""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.staleness import StalenessGate


def test_capacity_matches_the_published_values() -> None:
    assert StalenessGate(2, 4).capacity() == 12
    assert StalenessGate(2, 4, version=5, accepted=20).capacity() == 12
    assert StalenessGate(2, 4, running=3).capacity() == 9
    assert StalenessGate(0, 4, accepted=9).capacity() == -5


def test_recovery_counts_the_batches_of_the_versions_before() -> None:
    gate = StalenessGate(1, 4, running=3, accepted=99)
    gate.recover(7)
    assert (gate.version, gate.running, gate.accepted, gate.capacity()) == (7, 0, 28, 8)


@dataclass
class Consumer:
    """A gate with the groups that it admitted, and the ages of those that were trained."""

    gate: StalenessGate
    running: list[int] = field(default_factory=list)  # version at which each group was started
    kept: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)

    def start(self) -> None:
        if self.gate.capacity() > 0:
            self.gate.start()
            self.running.append(self.gate.version)

    def end(self, position: int, *, keep: bool) -> None:
        if self.running:
            started = self.running.pop(position % len(self.running))
            self.gate.finish(accepted=keep)
            self.kept += [started] * keep

    def train(self) -> None:
        batch = self.gate.batch_size
        if len(self.kept) >= batch:
            self.ages += [self.gate.version - started for started in self.kept[:batch]]
            del self.kept[:batch]
            self.gate.version += 1


@given(
    st.integers(0, 4),
    st.integers(1, 5),
    st.lists(st.sampled_from(["start", "start", "keep", "drop", "train"]), max_size=300),
    st.randoms(use_true_random=False),
)
def test_the_mean_age_of_trained_groups_is_bounded_whatever_ends_when(
    eta: int, batch: int, events: list[str], order: random.Random
) -> None:
    """Any group may end next; after each step at most ``eta`` batches of groups are under way."""
    world = Consumer(StalenessGate(eta, batch))
    for event in events:
        if event == "start":
            world.start()
        elif event == "train":
            trained = len(world.ages)
            world.train()
            if len(world.ages) > trained:
                assert len(world.running) + len(world.kept) <= eta * batch
        else:
            world.end(order.randrange(1000), keep=event == "keep")
        assert sum(world.ages) <= eta * len(world.ages)


@given(
    st.integers(0, 4), st.integers(1, 5), st.lists(st.sampled_from(["start", "keep", "drop", "train"]), max_size=200)
)
def test_groups_that_end_in_the_order_of_their_start_are_never_older(eta: int, batch: int, events: list[str]) -> None:
    world = Consumer(StalenessGate(eta, batch))
    for event in events:
        if event == "start":
            world.start()
        elif event == "train":
            world.train()
        else:
            world.end(0, keep=event == "keep")
    assert all(age <= eta for age in world.ages)


def test_a_slow_group_can_be_much_older_than_the_bound() -> None:
    """The gate limits how many groups are started: while others fill the batches, a slow one grows old."""
    world = Consumer(StalenessGate(1, 4))
    world.start()  # the slow one
    for _ in range(9):
        while world.gate.capacity() > 0:
            world.start()
        for _ in range(4):
            world.end(1, keep=True)
        world.train()
    world.end(0, keep=True)
    while len(world.kept) < 4:
        world.start()
        world.end(0, keep=True)
    world.train()
    assert max(world.ages) == 9
    assert sum(world.ages) <= len(world.ages), "the mean holds nevertheless"
