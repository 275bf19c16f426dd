"""Two small asyncio tools: a wake-up call, and running coroutines together with plain exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Pulse:
    """Wakes everyone who waits at the moment it fires; who comes later waits for the next time."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wakes the waiting."""
        self._event.set()
        self._event.clear()

    async def wait(self) -> None:
        """Waits for the next `fire`."""
        await self._event.wait()


async def run_all(coroutines: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Runs coroutines together and returns their results in order; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
