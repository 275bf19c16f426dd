"""The thread that computes: what happens to work whose caller goes away, and to everybody when a rank has failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from rollwire.learner.distributed import rank_failed
from rollwire.learner.rank_watch import RankFailure
from rollwire.learner.torch_thread import TorchThread
from rollwire.rpc.errors import RollwireError

LIMIT_S = 30.0


class Blocked:
    """Work that goes on until it is let go, and then raises what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._error = error

    def __call__(self) -> str:
        self.began.set()
        assert self.go_on.wait(LIMIT_S)
        if self._error is not None:
            raise self._error
        return "done"


@pytest.fixture
def told() -> list[RollwireError]:
    """What the thread's owner was told of failures."""
    return []


@pytest.fixture
async def thread(told: list[RollwireError]) -> AsyncIterator[TorchThread]:
    thread = TorchThread(told.append)
    yield thread
    await thread.close()


async def started(thread: TorchThread, work: Blocked) -> asyncio.Task[str]:
    task = asyncio.create_task(thread.run(work))
    assert await asyncio.to_thread(work.began.wait, LIMIT_S)
    return task


async def test_work_whose_caller_went_away_before_it_began_is_not_done(thread: TorchThread) -> None:
    """Or else callers that give up and come again would pile it up without end."""
    work, done = Blocked(), []
    running = await started(thread, work)
    waiting = asyncio.create_task(thread.run(done.append, "late"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    work.go_on.set()

    assert await running == "done"
    await thread.run(done.append, "next")
    assert done == ["next"]


async def test_a_rank_that_fails_is_noticed_although_the_caller_went_away(
    thread: TorchThread, told: list[RollwireError]
) -> None:
    work = Blocked(rank_failed(RankFailure(1, "out of memory")))
    running = await started(thread, work)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    work.go_on.set()

    async with asyncio.timeout(LIMIT_S):
        while not thread.failed:
            await asyncio.sleep(0.01)
    assert [error.reason for error in told] == ["RANK_FAILED"]
    with pytest.raises(RollwireError, match="rank 1 of the learner failed: out of memory"):
        await thread.run(lambda: None)


async def test_an_error_that_nobody_waits_for_is_no_noise(thread: TorchThread, told: list[RollwireError]) -> None:
    noise: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
    work = Blocked(ValueError("odd"))
    running = await started(thread, work)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    work.go_on.set()

    await thread.run(lambda: None)  # runs after it
    del running
    assert not thread.failed and not told and not noise


async def test_a_failed_rank_ends_what_runs_and_what_waits(thread: TorchThread, told: list[RollwireError]) -> None:
    work = Blocked()
    running = await started(thread, work)
    waiting = asyncio.create_task(thread.run(lambda: "never"))
    await asyncio.sleep(0)
    thread.fail(rank_failed(RankFailure(2, "lost")))
    for task in (running, waiting):
        with pytest.raises(RollwireError, match="rank 2 of the learner failed: lost"):
            await task
    thread.fail(rank_failed(RankFailure(3, "lost as well")))
    assert [error.metadata["rank"] for error in told] == ["2"]
    work.go_on.set()
