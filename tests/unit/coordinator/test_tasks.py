from __future__ import annotations

import asyncio

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.tasks import Pulse, run_all


async def test_results_come_in_order_whatever_ends_first() -> None:
    async def after(delay: float) -> float:
        await asyncio.sleep(delay)
        return delay

    assert await run_all(after(delay) for delay in (0.02, 0.0, 0.01)) == [0.02, 0.0, 0.01]


async def test_the_first_error_is_raised_as_it_is_and_ends_the_others() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def fail() -> None:
        raise RunError("broken")

    with pytest.raises(RunError, match="broken"):
        await run_all([wait(), fail()])
    assert ended.is_set()


async def test_a_pulse_wakes_those_who_wait_and_nobody_later() -> None:
    pulse = Pulse()
    waiters = [asyncio.create_task(pulse.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    pulse.fire()
    await asyncio.wait_for(asyncio.gather(*waiters), 1)
    late = asyncio.create_task(pulse.wait())
    await asyncio.sleep(0.01)
    assert not late.done()
    late.cancel()
