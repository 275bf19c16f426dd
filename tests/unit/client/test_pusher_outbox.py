"""What a pusher has on its way, whatever its connections do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rollwire.client.pusher import MAX_UNANSWERED, _Outbox
from rollwire.v1 import trajectory_pb2


class Source:
    """Gives out trajectories one by one, when told to."""

    def __init__(self) -> None:
        self.taken = 0
        self._items: asyncio.Queue[str | None] = asyncio.Queue()

    def give(self, *names: str | None) -> None:
        for name in names:
            self._items.put_nowait(name)

    async def items(self) -> AsyncIterator[trajectory_pb2.Trajectory]:
        while (name := await self._items.get()) is not None:
            self.taken += 1
            yield trajectory_pb2.Trajectory(trajectory_id=name)


async def following(requests: AsyncIterator[object], count: int) -> list[str]:
    return [(await anext(requests)).trajectory.trajectory_id for _ in range(count)]  # type: ignore[attr-defined]


async def test_a_connection_that_is_gone_but_still_waits_takes_nothing_away() -> None:
    source = Source()
    outbox = _Outbox(source.items())
    source.give("a")
    broken = outbox.requests()
    assert await following(broken, 1) == ["a"]
    waiting = asyncio.create_task(anext(broken))
    await asyncio.sleep(0)  # it waits for what comes next
    whole = outbox.requests()
    assert await following(whole, 1) == ["a"]
    source.give("b", "c")
    assert await following(whole, 2) == ["b", "c"]
    waiting.cancel()
    await outbox.close()


async def test_each_connection_begins_with_the_oldest_that_has_no_answer() -> None:
    source = Source()
    outbox = _Outbox(source.items())
    source.give("a", "b", "c", None)
    assert await following(outbox.requests(), 3) == ["a", "b", "c"]
    outbox.answered()
    second = outbox.requests()
    assert await following(second, 2) == ["b", "c"]
    outbox.answered()
    outbox.answered()
    assert [item async for item in second] == [] and outbox.done
    await outbox.close()


async def test_no_more_is_read_than_may_be_unanswered() -> None:
    source = Source()
    outbox = _Outbox(source.items())
    source.give(*(f"{number}" for number in range(MAX_UNANSWERED + 5)))
    requests = outbox.requests()
    await following(requests, MAX_UNANSWERED)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(outbox.unanswered) == MAX_UNANSWERED and source.taken <= MAX_UNANSWERED + 1
    outbox.answered()
    assert await following(requests, 1) == [f"{MAX_UNANSWERED}"]
    await outbox.close()
