"""A real environment server on a loopback port, with environments of a user's own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.ids import new_id
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import environment_pb2 as pb

Serve = Callable[..., AbstractAsyncContextManager[EnvironmentClient]]
Opening = Callable[..., pb.OpenSessionRequest]

DEFINITIONS: dict[str, Any] = {
    "Counting": {"type": "troublesome:Counting", "isolation": "thread"},
    "Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": 1.0},
    "Blind": {"type": "troublesome:Blind", "isolation": "thread"},
    "BigLake": {"type": "FrozenLake", "options": {"size": 8, "max_steps": 50}},
}


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def troublesome(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module with misbehaving environments; hanging ones are let go afterwards."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    import troublesome  # type: ignore[import-not-found]

    troublesome.log.clear()
    troublesome.release.clear()
    yield troublesome
    troublesome.release.set()
    del sys.modules["troublesome"]


@pytest.fixture(autouse=True)
def _mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Marks the processes that this test starts, whatever becomes of their parents."""
    mark = new_id("mark")
    monkeypatch.setenv("ROLLWIRE_TEST_MARK", mark)
    return mark


@pytest.fixture
def alive(_mark: str) -> Callable[[], set[int]]:
    """Finds the processes that this test has started and that have not ended."""
    return lambda: {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if _holds(path, _mark)}


def _holds(path: Path, mark: str) -> bool:
    try:
        return mark.encode() in path.read_bytes()
    except OSError:
        return False


@pytest.fixture
def gone(alive: Callable[[], set[int]]) -> Callable[[], Coroutine[Any, Any, None]]:
    """Waits until nothing that this test has started is left."""

    async def wait() -> None:
        async with asyncio.timeout(60):
            while alive():
                await asyncio.sleep(0.02)

    return wait


@pytest.fixture
def serve(clock: Clock, troublesome: ModuleType) -> Serve:
    """Starts a server with the settings of the section `environment`, and gives a client of it."""

    @asynccontextmanager
    async def start(**environment: Any) -> AsyncIterator[EnvironmentClient]:
        environment.setdefault("definitions", DEFINITIONS)
        server = EnvironmentServer(RunConfig.model_validate({"environment": environment}), clock)
        async with serving(server, Binding(), grace_s=5) as running, EnvironmentClient(running.address) as client:
            troublesome.log.clear()  # of what the server constructs to try it, and closes
            yield client

    return start


@pytest.fixture
async def client(serve: Serve) -> AsyncIterator[EnvironmentClient]:
    async with serve() as client:
        yield client


@pytest.fixture
def opening() -> Opening:
    """Makes requests to open a session."""

    def make(
        tag: str = "FrozenLake", seed: int = 42, lease_s: float | None = None, request_id: str = "", **options: Any
    ) -> pb.OpenSessionRequest:
        request = pb.OpenSessionRequest(request_id=request_id or new_id("test"), environment_tag=tag, seed=seed)
        if options:
            request.options.update(options)
        if lease_s is not None:
            request.lease.FromNanoseconds(int(lease_s * 1e9))
        return request

    return make
