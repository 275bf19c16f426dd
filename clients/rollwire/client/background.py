"""One event loop in a thread of its own, for programs that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def run_in_background(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine on the process's background loop, waits for it and returns its result.

    Any number of threads may call it at once. An interrupted wait, as by Ctrl-C, cancels the coroutine.
    """
    future = asyncio.run_coroutine_threadsafe(work, _background_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _background_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="rollwire-client", daemon=True).start()
        return _loop
