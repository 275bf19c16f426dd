"""An environment whose module runs a thread: a fork of it would not be safe."""

import threading
import time

from faulty import Faulty  # type: ignore[import-not-found]

started = threading.Event()


def run() -> None:
    started.set()
    while True:
        time.sleep(3600)


threading.Thread(target=run, daemon=True).start()
started.wait()


class NeedsItsThread(Faulty):
    """Tells whether the thread of its module runs in this process."""

    def do_threads(self) -> str:
        return str(threading.active_count())
