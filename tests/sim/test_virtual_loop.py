"""The virtual clock: waiting costs no time, and what waits for ever is named."""

import asyncio
import time

import pytest

from agentrl.sim.virtual_loop import Deadlock, VirtualLoop, run_virtual


def test_an_hour_passes_at_once_and_timers_ring_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        rung: list[tuple[str, float]] = []

        async def ring(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            rung.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(ring("late", 3600.0), ring("early", 0.5), ring("between", 7.0))
        return rung

    start = time.process_time()
    assert run_virtual(main()) == [("early", 0.5), ("between", 7.0), ("late", 3600.0)]
    assert time.process_time() - start < 60.0, "the clock of the machine is not waited for"


def test_a_task_that_waits_for_nothing_is_named_with_its_place() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(forever(), name="the-forgotten-one")

    with pytest.raises(Deadlock, match=r"the-forgotten-one in [^;]*forever \(test_virtual_loop\.py"):
        run_virtual(main())


def test_something_that_polls_does_not_hide_what_waits() -> None:
    async def poll() -> None:
        while True:
            await asyncio.sleep(5.0)

    async def main() -> None:
        polling = asyncio.create_task(poll(), name="probes")
        try:
            await asyncio.Event().wait()
        finally:
            polling.cancel()

    with pytest.raises(Deadlock, match=r"no end within 1005 virtual seconds: .*main"):
        run_virtual(main(), limit=1000.0)


def test_timeouts_are_virtual_and_threads_run_in_place() -> None:
    async def main() -> tuple[float, int]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 100.0)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return asyncio.get_running_loop().time(), await asyncio.to_thread(lambda: 3)

    assert run_virtual(main()) == (100.0, 3)


def test_the_loop_is_closed_after_a_deadlock() -> None:
    made: list[VirtualLoop] = []

    async def main() -> None:
        made.append(asyncio.get_running_loop())  # type: ignore[arg-type]
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main())
    assert made[0].is_closed()
