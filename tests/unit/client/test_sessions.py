"""The session table alone: leases, idempotency, bounds. The state machine compares it with a plain model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollwire.client.sessions import (
    Admission,
    CapacityReachedError,
    EpisodeEndedError,
    Phase,
    RequestIdReusedError,
    Session,
    SessionTable,
    UnknownSessionError,
    WrongTurnError,
)

Table = SessionTable[str, str]
AnySession = Session[str, str]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def new_table(capacity: int = 4) -> tuple[Table, Clock]:
    clock = Clock()
    return SessionTable(capacity, clock), clock


def opened(table: Table, request_id: str = "a", lease_s: float = 10.0) -> AnySession:
    admission, session = table.open(request_id, b"same", lease_s)
    assert admission is Admission.RUN
    table.started(session, f"start of {request_id}")
    return session


def played(table: Table, session: AnySession, turn: int, *, ended: bool = False) -> None:
    admission, found = table.begin_turn(session.session_id, turn)
    assert (admission, found) == (Admission.RUN, session)
    table.end_turn(session, f"reply {turn}", ended=ended)


def test_a_repeated_opening_waits_and_then_gets_the_first_answer() -> None:
    table, _ = new_table()
    _, session = table.open("a", b"same", 10)
    assert table.open("a", b"same", 10) == (Admission.WAIT, session)
    table.started(session, "hello")
    assert table.open("a", b"same", 10) == (Admission.REPEAT, session)
    assert session.opened == "hello"
    assert len(table) == 1


def test_a_request_id_opens_one_kind_of_session_only() -> None:
    table, _ = new_table()
    opened(table)
    with pytest.raises(RequestIdReusedError):
        table.open("a", b"other", 10)


def test_a_request_id_is_free_again_after_closing_failing_and_expiring() -> None:
    table, clock = new_table()
    table.close(opened(table).session_id)
    _, failed = table.open("a", b"other", 10)
    table.forget(failed)
    opened(table, lease_s=10)
    clock.now += 10
    admission, fresh = table.open("a", b"third", 10)  # not reaped yet
    assert admission is Admission.RUN
    assert len(table.reap()) == 1
    table.started(fresh, "hello")
    assert table.open("a", b"third", 10) == (Admission.REPEAT, fresh)


def test_a_repeated_turn_waits_and_then_gets_the_same_reply() -> None:
    table, _ = new_table()
    session = opened(table)
    table.begin_turn(session.session_id, 0)
    assert table.begin_turn(session.session_id, 0) == (Admission.WAIT, session)
    table.end_turn(session, "reply 0", ended=False)
    assert table.begin_turn(session.session_id, 0) == (Admission.REPEAT, session)
    assert session.reply == "reply 0"


@pytest.mark.parametrize("turn", [0, 1, 3, 2**32 - 1])
def test_only_the_next_and_the_latest_turn_can_be_asked_for(turn: int) -> None:
    table, _ = new_table()
    session = opened(table)
    for earlier in range(3):
        played(table, session, earlier)
    if turn == 3:
        played(table, session, 3)
        return
    with pytest.raises(WrongTurnError) as caught:
        table.begin_turn(session.session_id, turn)
    assert caught.value.next_turn == 3


def test_the_next_turn_cannot_begin_while_one_is_played() -> None:
    table, _ = new_table()
    session = opened(table)
    table.begin_turn(session.session_id, 0)
    with pytest.raises(WrongTurnError):
        table.begin_turn(session.session_id, 1)


def test_after_the_end_only_the_last_reply_remains() -> None:
    table, _ = new_table()
    session = opened(table)
    played(table, session, 0, ended=True)
    assert table.begin_turn(session.session_id, 0)[0] is Admission.REPEAT
    with pytest.raises(EpisodeEndedError):
        table.begin_turn(session.session_id, 1)
    with pytest.raises(WrongTurnError):
        table.begin_turn(session.session_id, 2)


def test_a_starting_session_cannot_be_used_or_closed() -> None:
    table, _ = new_table()
    _, session = table.open("a", b"same", 10)
    with pytest.raises(UnknownSessionError):
        table.begin_turn(session.session_id, 0)
    assert table.close(session.session_id) is None
    assert len(table) == 1


@pytest.mark.parametrize("call", ["find", "renew", "begin_turn"])
def test_every_call_renews_the_lease(call: str) -> None:
    table, clock = new_table()
    session = opened(table, lease_s=10)
    clock.now += 9
    getattr(table, call)(session.session_id, *{"renew": [None], "begin_turn": [0]}.get(call, []))
    assert session.expires_at_s == clock.now + 10


def test_a_lease_ends_exactly_after_its_length() -> None:
    table, clock = new_table()
    session = opened(table, lease_s=10)
    clock.now += 9.999
    assert table.reap() == []
    clock.now += 0.001
    with pytest.raises(UnknownSessionError):
        table.find(session.session_id)
    assert table.reap() == [session]
    assert session.closed
    assert len(table) == 0


def test_a_session_that_is_used_does_not_expire() -> None:
    table, clock = new_table()
    _, starting = table.open("a", b"same", 1)
    playing = opened(table, "b", lease_s=1)
    table.begin_turn(playing.session_id, 0)
    clock.now += 1000
    assert table.reap() == []
    assert table.begin_turn(playing.session_id, 0) == (Admission.WAIT, playing)
    clock.now += 1000
    assert table.open("a", b"same", 1) == (Admission.WAIT, starting)
    clock.now += 1000
    table.started(starting, "hello")
    table.end_turn(playing, "reply", ended=False)
    assert {starting.expires_at_s, playing.expires_at_s} == {clock.now + 1}


def test_a_lease_can_change_its_length() -> None:
    table, clock = new_table()
    session = opened(table, lease_s=10)
    table.renew(session.session_id, 100)
    clock.now += 99
    table.renew(session.session_id, None)
    assert session.expires_at_s == clock.now + 100


def test_the_table_is_bounded() -> None:
    table, _ = new_table(capacity=2)
    opened(table, "a")
    _, failing = table.open("b", b"same", 10)
    with pytest.raises(CapacityReachedError):
        table.open("c", b"same", 10)
    assert table.open("a", b"same", 10)[0] is Admission.REPEAT
    table.forget(failing)
    opened(table, "c")


def test_closing_removes_everything() -> None:
    table, _ = new_table()
    first, second = opened(table, "a"), opened(table, "b")
    assert table.close("unknown") is None
    assert table.close(first.session_id) is first
    assert table.close_all() == [second]
    assert len(table) == 0


@dataclass
class Expected:
    """What the model knows about one session."""

    session: AnySession
    lease_s: float
    expires_at_s: float
    busy: bool = True
    turns: int = 0
    reply: str | None = None
    ended: bool = False
    history: list[str] = field(default_factory=list)


class SessionMachine(RuleBasedStateMachine):
    """Random clients, hosts and clocks against a model without any cleverness."""

    CAPACITY = 3
    REQUESTS = st.sampled_from(["a", "b", "c", "d", "e"])
    LEASES = st.sampled_from([1.0, 3.0, 10.0])

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table: Table = SessionTable(self.CAPACITY, self.clock)
        self.live: dict[str, Expected] = {}  # by request id; expired ones stay until they are reaped
        self.orphans: list[Expected] = []  # expired, replaced by a new session with their request id, not reaped
        self.plays = 0

    def expired(self, item: Expected) -> bool:
        return not item.busy and item.expires_at_s <= self.clock.now

    def renewed(self, item: Expected) -> None:
        item.expires_at_s = self.clock.now + item.lease_s

    def usable(self) -> list[Expected]:
        return [item for item in self.live.values() if not self.expired(item)]

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(request=REQUESTS, lease_s=LEASES, content=st.sampled_from([b"x", b"x", b"y"]))
    def open(self, request: str, lease_s: float, content: bytes) -> None:
        known = self.live.get(request)
        if known is not None and not self.expired(known):
            if known.session.fingerprint != content:
                with pytest.raises(RequestIdReusedError):
                    self.table.open(request, content, lease_s)
                return
            admission, session = self.table.open(request, content, lease_s)
            assert session is known.session
            assert admission is (Admission.WAIT if session.opened is None else Admission.REPEAT)
            self.renewed(known)
            return
        if len(self.live) + len(self.orphans) >= self.CAPACITY:
            with pytest.raises(CapacityReachedError):
                self.table.open(request, content, lease_s)
            return
        admission, session = self.table.open(request, content, lease_s)
        assert admission is Admission.RUN
        if known is not None:
            self.orphans.append(known)
        self.live[request] = Expected(session, lease_s, self.clock.now + lease_s)

    @precondition(lambda self: any(item.session.opened is None for item in self.live.values()))
    @rule(data=st.data(), succeeds=st.sampled_from([True, True, False]))
    def start_ends(self, data: st.DataObject, succeeds: bool) -> None:
        starting = [request for request, item in self.live.items() if item.session.opened is None]
        request = data.draw(st.sampled_from(starting))
        item = self.live[request]
        if not succeeds:
            self.table.forget(item.session)
            del self.live[request]
            return
        self.table.started(item.session, f"start of {request}")
        item.busy = False
        self.renewed(item)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), offset=st.sampled_from([-2, -1, -1, 0, 0, 0, 1]))
    def begin_turn(self, data: st.DataObject, offset: int) -> None:
        item = data.draw(st.sampled_from(list(self.live.values())))
        turn = item.turns + offset
        session_id = item.session.session_id
        if item.session.opened is None or self.expired(item):
            with pytest.raises(UnknownSessionError):
                self.table.begin_turn(session_id, turn)
            return
        if offset == -1 and item.turns > 0:
            admission, session = self.table.begin_turn(session_id, turn)
            assert admission is (Admission.WAIT if item.busy else Admission.REPEAT)
            assert session.reply == item.reply
        elif offset == 0 and item.ended and not item.busy:
            with pytest.raises(EpisodeEndedError):
                self.table.begin_turn(session_id, turn)
        elif offset == 0 and not item.busy:
            admission, _ = self.table.begin_turn(session_id, turn)
            assert admission is Admission.RUN
            item.busy, item.reply = True, None
            item.turns += 1
        elif turn >= 0:
            with pytest.raises(WrongTurnError) as caught:
                self.table.begin_turn(session_id, turn)
            assert caught.value.next_turn == item.turns
        else:
            return
        self.renewed(item)

    @precondition(lambda self: any(item.busy and item.session.opened for item in self.live.values()))
    @rule(data=st.data(), ended=st.booleans())
    def turn_ends(self, data: st.DataObject, ended: bool) -> None:
        playing = [item for item in self.live.values() if item.busy and item.session.opened]
        item = data.draw(st.sampled_from(playing))
        self.plays += 1
        reply = f"play {self.plays}"
        self.table.end_turn(item.session, reply, ended=ended)
        item.busy, item.reply, item.ended = False, reply, ended
        item.history.append(reply)
        self.renewed(item)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), lease_s=st.one_of(st.none(), LEASES))
    def renew(self, data: st.DataObject, lease_s: float | None) -> None:
        item = data.draw(st.sampled_from(list(self.live.values())))
        if item.session.opened is None or self.expired(item):
            with pytest.raises(UnknownSessionError):
                self.table.renew(item.session.session_id, lease_s)
            return
        self.table.renew(item.session.session_id, lease_s)
        item.lease_s = lease_s if lease_s is not None else item.lease_s
        self.renewed(item)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.live)))
        item = self.live[request]
        found = self.table.close(item.session.session_id)
        if item.session.opened is None:
            assert found is None
        else:
            assert found is item.session
            del self.live[request]

    @rule()
    def reap(self) -> None:
        expected = {id(item.session) for item in [*self.live.values(), *self.orphans] if self.expired(item)}
        assert {id(session) for session in self.table.reap()} == expected
        self.live = {request: item for request, item in self.live.items() if not self.expired(item)}
        self.orphans = []

    @invariant()
    def bounded_and_in_step_with_the_model(self) -> None:
        assert len(self.table) == len(self.live) + len(self.orphans) <= self.CAPACITY
        for item in self.live.values():
            assert item.session.expires_at_s == item.expires_at_s
            assert item.session.busy == item.busy
            assert item.session.turns == item.turns == len(item.history) + (item.session.phase is Phase.PLAYING)


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
