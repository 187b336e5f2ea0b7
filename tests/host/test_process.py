"""The share of a core that a process uses."""

from agentrl.host.process import CpuShare


def test_each_figure_is_of_the_time_since_the_one_before() -> None:
    cpu, clock = iter([5.0, 6.0, 6.5, 9.0]), iter([100.0, 104.0, 104.5, 104.5])
    share = CpuShare(lambda: next(cpu), lambda: next(clock))
    assert share.since_last() == 0.25
    assert share.since_last() == 1.0
    assert share.since_last() is None, "no time has passed"
