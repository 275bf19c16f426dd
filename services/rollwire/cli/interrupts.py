"""Ctrl-C: the first one ends a run cleanly, the second one at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupts:
    """Cancels a task at the first SIGINT or SIGTERM and ends the process at the second.

    Args:
        on_first: Tells people that the run is being ended, by which signal.
        on_second: Runs right before the process ends; must not wait.

    Attributes:
        received: The first signal that arrived; None while none did.
    """

    def __init__(self, on_first: Callable[[signal.Signals], None], on_second: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._on_first = on_first
        self._on_second = on_second

    def install(self, task: asyncio.Task[object]) -> None:
        """Takes over the signals of this process for the life of the running loop."""
        loop = asyncio.get_running_loop()
        for number in EXIT_STATUS:
            loop.add_signal_handler(number, self._handle, number, task)

    def _handle(self, number: signal.Signals, task: asyncio.Task[object]) -> None:
        if self.received is not None:
            self._on_second()
            os._exit(EXIT_STATUS[number])
        self.received = number
        self._on_first(number)
        task.cancel()
