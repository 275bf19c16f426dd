"""The server's side of a worker, against a worker that a test plays."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from rollwire.client.results import failure
from rollwire.environment.isolation import connection as module
from rollwire.environment.isolation.connection import Outcome, WorkerConnection, WorkerEvents
from rollwire.environment.isolation.frames import FrameReader, Kind, frame
from rollwire.v1 import environment_pb2 as pb

LOST = failure(pb.ENVIRONMENT_FAILURE_KIND_LOST, "Lost", "its process is gone")


@dataclass
class Peer:
    """The worker's end, and what the connection reported."""

    socket: socket.socket
    connection: WorkerConnection
    learned: list[pb.EnvironmentDescription] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    broken: list[pb.EnvironmentFailure] = field(default_factory=list)

    async def send(self, kind: Kind, payload: bytes = b"") -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, frame(kind, payload))

    async def reply(self, call_id: int, observation: str = "") -> None:
        reply = pb.SessionReply(call_id=call_id, step=pb.StepResponse(observation=observation))
        await self.send(Kind.REPLY, reply.SerializeToString())

    async def receive(self, count: int) -> list[pb.SessionCall]:
        reader, calls = FrameReader(), []
        while len(calls) < count:
            data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
            assert data
            calls += [pb.SessionCall.FromString(payload) for _, payload in reader.feed(data)]
        return calls

    def call(self, timeout_s: float = 60) -> asyncio.Future[Outcome]:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.connection.call(pb.SessionCall(step=pb.StepRequest(action="a")), timeout_s, outcome.set_result)
        return outcome


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    learned: list[pb.EnvironmentDescription] = []
    stacks: list[str] = []
    broken: list[pb.EnvironmentFailure] = []
    connection = WorkerConnection(WorkerEvents(learned.append, stacks.append, broken.append))
    made = Peer(theirs, connection, learned, stacks, broken)
    before = made.call()  # calls may come before there is a connection
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
    (call,) = await made.receive(1)
    await made.send(Kind.STARTED)
    await made.reply(call.call_id)
    await before
    yield made
    connection.close()
    theirs.close()


async def test_replies_find_their_calls(peer: Peer) -> None:
    outcomes = [peer.call() for _ in range(3)]
    for number, call in enumerate(await peer.receive(3)):
        await peer.reply(call.call_id, str(number))
    replies = await asyncio.gather(*outcomes)
    assert [reply.step.observation for reply in replies if isinstance(reply, pb.SessionReply)] == ["0", "1", "2"]
    assert not peer.broken


async def test_what_a_worker_reports_beside_replies(peer: Peer) -> None:
    declared = pb.EnvironmentDescription(metric_aggregation={"m": pb.METRIC_AGGREGATION_SUM})
    await peer.send(Kind.LEARNED, declared.SerializeToString())
    await peer.send(Kind.STACK, b"Traceback \xff")
    outcome = peer.call()
    await peer.reply((await peer.receive(1))[0].call_id)
    await outcome
    assert peer.learned == [declared]
    assert peer.stacks == ["Traceback \ufffd"]


@pytest.mark.parametrize(
    "sent",
    [
        frame(Kind.REPLY, pb.SessionReply(call_id=77).SerializeToString()),  # to no call
        frame(Kind.REPLY, b"\xff\xff\xff"),
        frame(Kind.FORKED, b"{}"),
        b"what an environment prints\n",
    ],
)
async def test_a_worker_that_breaks_the_rules_is_given_up(peer: Peer, sent: bytes) -> None:
    outcomes = [peer.call() for _ in range(2)]
    await peer.receive(2)
    await asyncio.get_running_loop().sock_sendall(peer.socket, sent)
    first, second = await asyncio.gather(*outcomes)
    assert isinstance(first, pb.EnvironmentFailure) and isinstance(second, pb.EnvironmentFailure)
    assert first.kind == second.kind == pb.ENVIRONMENT_FAILURE_KIND_LOST
    assert first.message.startswith("its process wrote into the server's connection: ")
    assert second.message.startswith("another session of the same process failed")
    assert peer.broken == [first]
    assert await peer.call() == second


async def test_the_limit_of_time_is_that_of_the_call_being_played(peer: Peer) -> None:
    patient, hasty = peer.call(timeout_s=60), peer.call(timeout_s=0.05)
    calls = await peer.receive(2)
    done, _ = await asyncio.wait((hasty,), timeout=0.3)
    assert not done  # it waits for its turn
    await peer.reply(calls[0].call_id)
    assert isinstance(await patient, pb.SessionReply)
    found = await hasty
    assert isinstance(found, pb.EnvironmentFailure)
    assert (found.kind, found.message) == (pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT, "no answer within 0.05 s")
    assert peer.broken == [found]


async def test_an_idle_worker_has_no_limit_of_time(peer: Peer) -> None:
    outcome = peer.call(timeout_s=2)
    deadline_s = asyncio.get_running_loop().time() + 2
    await peer.reply((await peer.receive(1))[0].call_id)
    await outcome
    await asyncio.sleep(deadline_s + 0.1 - asyncio.get_running_loop().time())  # past that of the answered call
    later = peer.call()
    await peer.reply((await peer.receive(1))[0].call_id, "later")
    reply = await later
    assert isinstance(reply, pb.SessionReply) and reply.step.observation == "later"
    assert not peer.broken


async def test_a_worker_that_never_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.05)
    broken: asyncio.Future[pb.EnvironmentFailure] = asyncio.get_running_loop().create_future()
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    connection = WorkerConnection(WorkerEvents(print, print, broken.set_result))
    connection.call(pb.SessionCall(), 60, outcome.set_result)
    found = await outcome
    assert isinstance(found, pb.EnvironmentFailure)
    assert found.message == "its process did not start within 0.05 s"
    assert await broken == found


async def test_a_lost_worker_fails_what_waits_and_what_comes(peer: Peer) -> None:
    outcomes = [peer.call() for _ in range(3)]
    assert peer.connection.lose(LOST)
    assert [await outcome for outcome in outcomes] == [LOST] * 3
    assert await peer.call() == LOST
    assert not peer.connection.lose(LOST)
    assert not peer.broken  # whoever gave it up knows
