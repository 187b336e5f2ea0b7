"""Groups on their way to the trainer."""

import asyncio

from agentrl.core.columns import Columns
from agentrl.rollout.buffer import Group, GroupBuffer
from agentrl.rollout.group_account import Tally


async def test_a_batch_has_the_oldest_groups_in_the_order_of_their_draws() -> None:
    buffer = GroupBuffer()
    waiting = asyncio.create_task(buffer.take(3))
    for draw in (2, 0, 1, 4, 3):  # as they are finished
        await buffer.put(Group(draw, Columns.of([]), Tally("kept")))
    assert [group.draw for group in await waiting] == [0, 1, 2]
    assert [group.draw for group in await buffer.take(2)] == [3, 4]


async def test_a_closed_buffer_gives_what_is_left_and_then_nothing() -> None:
    buffer = GroupBuffer()
    waiting = asyncio.create_task(buffer.take(2))
    for draw in (1, 0, 2):
        await buffer.put(Group(draw, Columns.of([]), Tally("kept")))
    assert [group.draw for group in await waiting] == [0, 1]
    waiting = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    assert not waiting.done(), "one group is no batch while more may come"
    await buffer.close()
    assert [group.draw for group in await waiting] == [2]
    assert await buffer.take(2) == []
