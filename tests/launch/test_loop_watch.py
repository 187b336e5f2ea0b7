"""A blocked event loop is named, and in the end left."""

import asyncio
import threading

import pytest

from agentrl.config.rollout import RolloutConfig
from agentrl.host.event_loop import EventLoop
from agentrl.launch.loop_watch import EXIT_CODE, SHORTEST_STANDSTILL, WARN_SECONDS, LoopWatch, leave_or_exit
from agentrl.launch.supervisor import ChildFailed


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


async def test_a_caller_beside_a_blocked_loop_gets_an_error_and_its_process_goes_on() -> None:
    codes, unblock = list[int](), threading.Event()
    loop = EventLoop()

    async def block() -> None:
        watch = LoopWatch(0.0, end=lambda code: leave_or_exit(loop, code, exit=codes.append))
        watch.start(asyncio.get_running_loop())
        unblock.wait()

    with pytest.raises(ChildFailed, match="event loop was blocked"), loop:
        loop.run(block())
    unblock.set()
    assert codes == []


def test_a_process_whose_own_loop_is_blocked_ends() -> None:
    codes = list[int]()
    with EventLoop() as loop:
        leave_or_exit(loop, EXIT_CODE, exit=codes.append)
    assert codes == [EXIT_CODE]
