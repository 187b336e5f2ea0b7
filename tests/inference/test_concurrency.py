"""How many requests an API is sent at a time, and what an episode's waiting counts as."""

import asyncio

from agentrl.inference.concurrency import Concurrency, Gate, Waits


def test_a_burst_of_refusals_halves_once_and_answers_raise_by_one_a_window() -> None:
    state = Concurrency(128)
    for _ in range(118):  # all sent under the same limit
        state.refused(0, now=0.0)
    assert (state.limit, state.epoch, state.lowest) == (64, 1, 64)
    for _ in range(64):
        state.answered()
    assert state.limit == 65
    for _ in range(65):
        state.answered()
    assert state.limit == 66


def test_the_limit_stays_between_one_and_the_most() -> None:
    state = Concurrency(3)
    for epoch in range(5):
        state.refused(epoch, now=0.0)
    assert state.limit == state.lowest == 1
    for _ in range(20):
        state.answered()
    assert state.limit == 3


def test_nothing_is_sent_before_the_time_that_the_api_named() -> None:
    state = Concurrency(4)
    state.refused(0, now=10.0, pause=5.0)
    state.refused(1, now=11.0, pause=1.0)  # an earlier time does not shorten it
    assert state.delay(12.0) == 3.0 and state.delay(15.0) == 0.0
    state.running = state.limit
    assert state.delay(15.0) is None


async def test_requests_pass_in_order_and_a_cancelled_one_gives_its_place_back() -> None:
    gate, passed = Gate(Concurrency(1)), list[int]()

    async def one(number: int, ticket: int) -> None:
        await gate.enter(ticket)
        passed.append(number)
        gate.leave()

    first, second, third = (gate.ticket() for _ in range(3))
    await gate.enter(gate.ticket())
    late, early, gone = (asyncio.create_task(one(*pair)) for pair in ((2, second), (1, first), (3, third)))
    await asyncio.sleep(0)
    gone.cancel()
    gate.leave()
    await asyncio.gather(late, early, gone, return_exceptions=True)
    assert passed == [1, 2] and gate.state.running == 0
    await gate.enter(gate.ticket())
    waiting = asyncio.create_task(one(4, gate.ticket()))
    await asyncio.sleep(0)
    gate.leave()  # it is let in, and cancelled before it goes on
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert gate.state.running == 0


def test_what_is_waited_for_twice_at_a_time_counts_once() -> None:
    now = [0.0]
    waits = Waits(lambda: now[0])
    with waits.waiting():
        now[0] = 2.0
        with waits.waiting():
            now[0] = 5.0
            assert waits.seconds == 5.0
    now[0] = 9.0
    assert waits.seconds == 5.0
