"""Threads of a provider: fast jobs share one, blocking ones get their own, hanging ones are given up and counted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rollwire.client.job_threads import JobThreads
from rollwire.client.threads import ThreadsHungError, WorkTimeoutError

LONG_S = 60.0


async def until(condition: Any) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_values_and_errors_come_back() -> None:
    threads = JobThreads("test", 2)
    assert await threads.run(lambda: 7, LONG_S) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0, LONG_S)


async def test_fast_jobs_one_after_the_other_share_a_thread() -> None:
    threads = JobThreads("test", 8)
    names = {await threads.run(lambda: threading.current_thread().name, LONG_S) for _ in range(200)}
    # A machine that is very busy may let a job wait long enough for a second thread; never one per job.
    assert len(names) <= 4


async def test_all_jobs_run_at_once_when_each_blocks() -> None:
    threads = JobThreads("test", 8)
    barrier = threading.Barrier(8)  # passes only when eight wait at it
    found = await asyncio.gather(*(threads.run(lambda: barrier.wait(LONG_S), LONG_S) for _ in range(8)))
    assert sorted(found) == list(range(8))


async def test_more_jobs_than_threads_wait_for_one() -> None:
    threads = JobThreads("test", 2)
    release = threading.Event()
    jobs = [asyncio.create_task(threads.run(lambda: release.wait(LONG_S), LONG_S)) for _ in range(6)]
    await until(lambda: len(threads._jobs) == 4)
    release.set()
    assert await asyncio.gather(*jobs) == [True] * 6


async def test_a_job_that_hangs_is_given_up_until_it_ends() -> None:
    threads = JobThreads("test", 2)
    release = threading.Event()
    with pytest.raises(WorkTimeoutError):
        await threads.run(lambda: release.wait(LONG_S), 0.05)
    assert threads.hung == 1
    assert await threads.run(lambda: "other", LONG_S) == "other"
    release.set()
    await until(lambda: threads.hung == 0)


async def test_nothing_runs_when_every_thread_hangs() -> None:
    threads = JobThreads("test", 1)
    release = threading.Event()
    with pytest.raises(WorkTimeoutError):
        await threads.run(lambda: release.wait(LONG_S), 0.05)
    with pytest.raises(ThreadsHungError):
        await threads.run(lambda: None, LONG_S)
    release.set()
    await until(lambda: threads.hung == 0)
    assert await threads.run(lambda: "again", LONG_S) == "again"


async def test_a_job_whose_time_is_over_before_it_starts_is_not_run() -> None:
    threads = JobThreads("test", 1)
    release, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run(lambda: release.wait(LONG_S), LONG_S))
    await until(lambda: threads._at_work == 1 and not threads._jobs)
    with pytest.raises(WorkTimeoutError):
        await threads.run(ran.set, 0.05)
    assert threads.hung == 0
    release.set()
    assert await first
    assert await threads.run(lambda: "later", LONG_S) == "later"
    assert not ran.is_set()
