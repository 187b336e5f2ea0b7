"""Blocking code runs coroutines, with and without a running loop."""

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from agentrl.host.event_loop import EventLoop
from agentrl.host.stop_signals import interruptible


async def where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    return asyncio.get_running_loop(), threading.current_thread()


def run_twice() -> list[Any]:
    with EventLoop() as loop:
        return [loop.run(where()), loop.run(where())]


def test_without_a_running_loop_all_runs_in_the_caller_and_on_one_loop() -> None:
    first, second = run_twice()
    assert first == second
    assert first[1] is threading.current_thread()


async def test_in_a_running_loop_all_runs_beside_it_and_on_one_loop() -> None:
    first, second = run_twice()
    assert first == second
    assert first[0] is not asyncio.get_running_loop() and first[1] is not threading.current_thread()
    assert first[0].is_closed() and not first[1].is_alive()


async def test_an_error_reaches_the_caller_beside_a_running_loop() -> None:
    async def fail() -> None:
        raise LookupError("inside")

    with EventLoop() as loop, pytest.raises(LookupError, match="inside"):
        loop.run(fail())


@pytest.mark.parametrize("attempt", range(20))
async def test_an_interrupt_beside_a_running_loop_cancels_what_runs_and_waits_for_its_end(attempt: int) -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)  # the main thread, which waits, gets it
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    with interruptible(), pytest.raises(KeyboardInterrupt), EventLoop() as loop:
        loop.run(endless())
    assert ended == ["cleaned up"]


async def test_a_blocked_loop_beside_a_running_one_can_be_left_and_is_cancelled_afterwards() -> None:
    blocked, unblock, ended = threading.Event(), threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        unblock.wait()  # the event loop with it
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(LookupError, match="left"), EventLoop() as loop:
        threading.Thread(target=lambda: blocked.wait() and loop.leave(LookupError("left"))).start()
        loop.run(block())
    assert not ended.is_set()
    unblock.set()
    assert ended.wait(60), "what ran is cancelled when the loop runs again"


def test_a_loop_in_the_main_thread_cannot_be_left() -> None:
    with EventLoop() as loop:
        assert not loop.leave(LookupError("left"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_is_an_interrupt_inside_the_block_alone(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


async def test_outside_the_main_thread_no_handler_is_set() -> None:
    def seen() -> Any:
        with interruptible():
            return signal.getsignal(signal.SIGTERM)

    assert await asyncio.to_thread(seen) == signal.getsignal(signal.SIGTERM)
