"""Threads that may hang: bounded, counted, given up, and taken back when they return after all."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from rollwire.client.threads import ThreadsHungError, WorkerThreads, WorkTimeoutError

LONG_S = 30.0
color: ContextVar[str] = ContextVar("color", default="none")


@pytest.fixture
def gate() -> threading.Event:
    """Work that waits for this hangs until the test lets it go."""
    return threading.Event()


async def until(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_work_returns_its_value_in_another_thread() -> None:
    threads = WorkerThreads("test", 2)
    assert await threads.run(threading.get_ident, LONG_S) != threading.get_ident()


async def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await WorkerThreads("test", 1).run(lambda: 1 // 0, LONG_S)


async def test_an_idle_thread_is_used_again() -> None:
    threads = WorkerThreads("test", 8)
    idents = {await threads.run(threading.get_ident, LONG_S) for _ in range(20)}
    assert len(idents) == 1


async def test_work_sees_the_context_of_its_caller() -> None:
    threads = WorkerThreads("test", 1)
    for name in ("red", "green"):
        color.set(name)
        assert await threads.run(color.get, LONG_S) == name


async def test_no_more_threads_than_the_limit_run_at_once(gate: threading.Event) -> None:
    threads = WorkerThreads("test", 3)
    running = 0
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(0.01)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(work, LONG_S) for _ in range(20)))
    assert most == 3


async def test_a_hanging_thread_is_given_up_and_replaced(gate: threading.Event) -> None:
    threads = WorkerThreads("test", 2)
    with pytest.raises(WorkTimeoutError):
        await threads.run(gate.wait, 0.02)
    assert threads.hung == 1
    assert await threads.run(lambda: "alive", LONG_S) == "alive"
    gate.set()
    await until(lambda: threads.hung == 0)


async def test_waiting_for_a_thread_does_not_count_as_hanging(gate: threading.Event) -> None:
    threads = WorkerThreads("test", 1)
    first = asyncio.create_task(threads.run(gate.wait, LONG_S))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.run(lambda: "done", 0.01))
    await asyncio.sleep(0.1)
    assert not second.done()
    gate.set()
    assert await first is True
    assert await second == "done"


async def test_when_all_threads_hang_everyone_is_refused_at_once(gate: threading.Event) -> None:
    threads = WorkerThreads("test", 2)
    hanging = [asyncio.create_task(threads.run(gate.wait, 0.05)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(threads.run(lambda: None, LONG_S))
    for task in hanging:
        with pytest.raises(WorkTimeoutError):
            await task
    with pytest.raises(ThreadsHungError):
        await waiting
    with pytest.raises(ThreadsHungError):
        await threads.run(lambda: None, LONG_S)
    gate.set()
    await until(lambda: threads.hung == 0)
    assert await threads.run(lambda: "back", LONG_S) == "back"


async def test_a_cancelled_caller_neither_loses_the_thread_nor_its_place_in_the_queue(gate: threading.Event) -> None:
    threads = WorkerThreads("test", 1)
    running = asyncio.create_task(threads.run(gate.wait, LONG_S))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(threads.run(lambda: "next", LONG_S)) for _ in range(2)]
    await asyncio.sleep(0)
    running.cancel()
    waiting[0].cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await waiting[1] == "next"
    assert await threads.run(lambda: "again", LONG_S) == "again"
