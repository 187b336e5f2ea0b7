"""The simulated accelerator, held against the sum that a step per token would give."""

import asyncio
import random

import pytest

from agentrl.sim.device import Device, Speed, Stretch
from agentrl.sim.virtual_loop import run_virtual

SPEED = Speed(token=0.006, sequence=0.001)


def by_hand(lengths: list[int], starts: list[float]) -> list[float]:
    """Ends of sequences, found by going through all stretches of constant rate."""
    left, now, ends = [float(length) for length in lengths], 0.0, [0.0] * len(lengths)
    while any(one > 0 for one in left):
        active = [i for i, one in enumerate(left) if one > 0 and starts[i] <= now]
        later = [start for i, start in enumerate(starts) if start > now and left[i] > 0]
        seconds = SPEED.token + SPEED.sequence * len(active)
        until = min([left[i] * seconds for i in active] + [start - now for start in later])
        for i in active:
            left[i] = 0.0 if left[i] * seconds <= until + 1e-9 else left[i] - until / seconds
            if left[i] == 0.0:
                ends[i] = now + until
        now += until
    return ends


def test_sequences_share_the_device() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 500) for _ in range(40)]
    starts = [round(chance.uniform(0, 3), 3) for _ in range(40)]

    async def main() -> list[float]:
        device, now = Device(SPEED), asyncio.get_running_loop().time

        async def one(length: int, start: float) -> float:
            await asyncio.sleep(start)
            assert await device.generate(length) == [Stretch(0, length)]
            return now()

        found = await asyncio.gather(*(one(*each) for each in zip(lengths, starts, strict=True)))
        assert device.tokens == pytest.approx(sum(lengths))
        return found

    assert run_virtual(main()) == pytest.approx(by_hand(lengths, starts), abs=1e-3)


def test_tokens_before_and_after_a_push_have_their_own_versions_and_a_pause_makes_none() -> None:
    async def main() -> None:
        device, now = Device(Speed(token=1.0, sequence=0.0)), asyncio.get_running_loop().time
        first = asyncio.create_task(device.generate(100))
        await asyncio.sleep(30.0)
        device.pause()
        await asyncio.sleep(7.0)
        device.set_version(1)
        device.resume()
        second = asyncio.create_task(device.generate(20))
        assert await second == [Stretch(1, 20)] and now() == pytest.approx(57.0)
        device.set_version(2)
        device.set_version(3)
        assert await first == [Stretch(0, 30), Stretch(1, 20), Stretch(3, 50)]
        assert now() == pytest.approx(107.0)

    run_virtual(main())


def test_slots_bound_what_runs_and_cancelled_sequences_leave_their_places() -> None:
    async def main() -> None:
        device, now = Device(Speed(token=1.0, sequence=0.0), slots=2), asyncio.get_running_loop().time
        jobs = [asyncio.create_task(device.generate(10)) for _ in range(4)]
        await asyncio.sleep(5.0)
        jobs[0].cancel()
        jobs[3].cancel()  # it waits
        await jobs[2]
        assert now() == pytest.approx(15.0), "it began when the first one left"
        assert device.tokens == pytest.approx(25.0), "5 of the cancelled one"
        assert device.cancelled == pytest.approx(5.0)

    run_virtual(main())


def test_an_abort_ends_what_runs_with_what_it_has() -> None:
    async def main() -> None:
        device = Device(Speed(token=1.0, sequence=0.0), slots=1)
        running, waiting = asyncio.create_task(device.generate(10)), asyncio.create_task(device.generate(3))
        await asyncio.sleep(4.0)
        device.abort()
        assert await running == [Stretch(0, 4)]
        assert await waiting == [Stretch(0, 3)]

    run_virtual(main())
