"""Groups on their way to the trainer."""

import asyncio

from agentrl.core.columns import Columns
from agentrl.rollout.buffer import Group, GroupBuffer


async def test_a_batch_has_the_oldest_groups_in_the_order_of_their_draws() -> None:
    buffer = GroupBuffer()
    waiting = asyncio.create_task(buffer.take(3))
    for draw in (2, 0, 1, 4, 3):  # as they are finished
        await buffer.put(Group(draw, Columns.of([])))
    assert [group.draw for group in await waiting] == [0, 1, 2]
    assert [group.draw for group in await buffer.take(2)] == [3, 4]
