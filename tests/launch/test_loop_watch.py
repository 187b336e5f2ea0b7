"""A blocked event loop is named, and in the end left."""

import pytest

from agentrl.config.rollout import RolloutConfig
from agentrl.launch.loop_watch import EXIT_CODE, SHORTEST_STANDSTILL, WARN_SECONDS, LoopWatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_standstill_is_named_once_and_then_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    clock, codes = Clock(), []
    watch = LoopWatch(60.0, clock=clock, end=codes.append)
    clock.now = WARN_SECONDS - 1
    watch.look()
    assert capsys.readouterr().err == ""
    for clock.now in (WARN_SECONDS, WARN_SECONDS + 1):
        watch.look()
    said = capsys.readouterr().err
    assert said.count("all episodes have stood still") == 1
    assert "test_a_standstill_is_named_once" in said and "test_loop_watch.py" in said
    watch.served()
    clock.now += WARN_SECONDS
    watch.look()
    assert "stood still" in capsys.readouterr().err, "each standstill is named"
    assert codes == []
    clock.now += 60
    watch.look()
    assert codes == [EXIT_CODE]
    assert "the event loop was blocked for 65 s in" in capsys.readouterr().err


def test_a_watch_waits_as_long_as_an_episode_may_take_and_never_less_than_half_a_minute() -> None:
    limits = [LoopWatch.of(RolloutConfig(episode_timeout=seconds)).limit for seconds in (1.0, 300.0)]
    assert limits == [SHORTEST_STANDSTILL, 300.0]
