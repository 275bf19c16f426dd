"""The hub of providers against a model of honest and lossy providers, and its rules one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollwire.environment.hub import RETRY_AFTER_S, Hub, ProtocolError
from rollwire.environment.hub_parts import Provider, Seat
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import environment_pb2 as pb

LEASE_S = 30.0
STEP_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def hello(name: str = "a", capacity: int = 2, sessions: tuple[str, ...] = (), **changes: Any) -> pb.ProviderHello:
    description = pb.EnvironmentDescription(tag="Count", summary="Counts.", max_turns=3)
    settings: dict[str, Any] = {
        "provider_id": name * 16,
        "environments": [description],
        "capacity": capacity,
        "session_ids": sessions,
        **changes,
    }
    return pb.ProviderHello(**settings)


def make_hub(clock: Callable[[], float], **changes: Any) -> Hub:
    settings: dict[str, Any] = {
        "hosted": ["FrozenLake"],
        "max_providers": 3,
        "lease_s": LEASE_S,
        "disable_after_failures": 5,
    }
    return Hub(**{**settings, **changes}, clock=clock)


def take(hub: Hub, provider: Provider) -> list[pb.SessionCall]:
    return hub.take(provider, provider.stream, 1 << 20)


def open_seat(hub: Hub, provider: Provider, session_id: str = "s") -> Seat:
    outcomes: list[Any] = []
    hub.open("Count", {}, 1, STEP_S, outcomes.append)
    (call,) = take(hub, provider)
    hub.reply(provider, opened(call.call_id, session_id))
    seat = outcomes[0][0]
    assert isinstance(seat, Seat)
    return seat


def opened(call_id: int, session_id: str) -> pb.SessionReply:
    return pb.SessionReply(call_id=call_id, open=pb.OpenSessionResponse(session_id=session_id, max_turns=3))


def stepped(call_id: int, **response: Any) -> pb.SessionReply:
    return pb.SessionReply(call_id=call_id, step=pb.StepResponse(**response))


def test_the_time_of_a_turn_is_over() -> None:
    clock = Clock()
    hub = make_hub(clock)
    provider = hub.attach(hello())
    seat = open_seat(hub, provider)
    outcomes: list[pb.StepResponse] = []
    hub.step(seat, "go", STEP_S, outcomes.append)
    (call,) = take(hub, provider)
    clock.now += STEP_S + 2
    hub.tick()
    assert outcomes[0].failure.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
    assert seat.ended
    hub.reply(provider, stepped(call.call_id, reward=1.0))  # too late, and no offence
    assert len(outcomes) == 1


def test_an_opening_that_is_late_is_closed_and_keeps_its_credit_until_then() -> None:
    clock = Clock()
    hub = make_hub(clock)
    provider = hub.attach(hello(capacity=1))
    outcomes: list[Any] = []
    hub.open("Count", {}, 1, STEP_S, outcomes.append)
    (call,) = take(hub, provider)
    clock.now += STEP_S + 2
    hub.tick()
    assert outcomes[0][1].failure.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
    with pytest.raises(RollwireError, match="no provider of Count has a free session") as full:
        hub.open("Count", {}, 1, STEP_S, outcomes.append)
    assert full.value.retry_after_s == RETRY_AFTER_S
    hub.reply(provider, opened(call.call_id, "late"))
    assert [one.close.session_id for one in take(hub, provider)] == ["late"]
    assert provider.free == 1
    assert len(outcomes) == 1


def test_an_opening_that_a_cut_left_unanswered_is_asked_again_before_its_session_is_closed() -> None:
    clock = Clock()
    hub = make_hub(clock)
    provider = hub.attach(hello())
    outcomes: list[Any] = []
    hub.open("Count", {}, 1, STEP_S, outcomes.append)
    (call,) = take(hub, provider)
    hub.cut(provider, provider.stream)
    provider = hub.attach(hello(sessions=("s", "stranger")))
    (again,) = take(hub, provider)
    assert again == call
    hub.reply(provider, opened(call.call_id, "s"))
    assert outcomes[0][0].session_id == "s"
    assert [one.close.session_id for one in take(hub, provider)] == ["stranger"]


def test_a_session_that_does_not_come_back_is_lost() -> None:
    hub = make_hub(Clock())
    provider = hub.attach(hello())
    kept, lost = open_seat(hub, provider, "kept"), open_seat(hub, provider, "lost")
    outcomes: list[pb.StepResponse] = []
    hub.step(kept, "go", STEP_S, outcomes.append)
    hub.step(lost, "go", STEP_S, outcomes.append)
    hub.cut(provider, provider.stream)
    provider = hub.attach(hello(sessions=("kept",)))
    assert [one.failure.kind for one in outcomes] == [pb.ENVIRONMENT_FAILURE_KIND_LOST]
    (call,) = take(hub, provider)
    assert call.step.session_id == "kept"


def test_a_provider_that_stays_away_loses_its_sessions_and_its_tag() -> None:
    clock = Clock()
    hub = make_hub(clock)
    provider = hub.attach(hello())
    seat = open_seat(hub, provider)
    outcomes: list[Any] = []
    hub.step(seat, "go", 1000.0, outcomes.append)
    hub.cut(provider, provider.stream)
    clock.now += LEASE_S - 1
    hub.tick()
    assert not outcomes
    assert "Count" in hub.tags
    clock.now += 1
    hub.tick()
    assert outcomes[0].failure.kind == pb.ENVIRONMENT_FAILURE_KIND_LOST
    assert not hub.tags
    assert not hub.providers
    hub.step(seat, "again", STEP_S, outcomes.append)
    assert outcomes[1].failure.kind == pb.ENVIRONMENT_FAILURE_KIND_LOST


def test_a_lost_provider_disables_no_tag() -> None:
    hub = make_hub(Clock(), disable_after_failures=2)
    first, second = hub.attach(hello("a", capacity=3)), hub.attach(hello("b", capacity=1))
    outcomes: list[Any] = []
    for index in range(3):
        hub.step(open_seat(hub, first, f"s{index}"), "go", STEP_S, outcomes.append)
        take(hub, first)
    hub.evict(first, "test")
    assert [one.failure.kind for one in outcomes] == [pb.ENVIRONMENT_FAILURE_KIND_LOST] * 3
    assert not hub.tags["Count"].disabled
    assert open_seat(hub, second).provider is second


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (lambda call_id: stepped(call_id + 1000), "which no call had"),
        (lambda call_id: stepped(0), "which no call had"),
    ],
)
def test_replies_to_nothing(reply: Callable[[int], pb.SessionReply], problem: str) -> None:
    hub = make_hub(Clock())
    provider = hub.attach(hello())
    seat = open_seat(hub, provider)
    hub.step(seat, "go", STEP_S, lambda _: None)
    (call,) = take(hub, provider)
    with pytest.raises(ProtocolError, match=problem):
        hub.reply(provider, reply(call.call_id))


def test_a_flood_of_replies() -> None:
    hub = make_hub(Clock())
    provider = hub.attach(hello())
    seat = open_seat(hub, provider)
    hub.step(seat, "go", STEP_S, lambda _: None)
    (call,) = take(hub, provider)
    hub.reply(provider, stepped(call.call_id))
    with pytest.raises(ProtocolError, match="more replies than calls"):
        hub.reply(provider, stepped(call.call_id))


@pytest.mark.parametrize(
    "response",
    [
        {"reward": math.nan},
        {"reward": math.inf},
        {"metrics": {"a": math.nan}},
        {"metrics": {"a b": 1.0}},
        {"metrics": {f"m{index}": 1.0 for index in range(257)}},
        {"observation": "ä" * (1 << 20)},
        {"suffix": "x" * ((1 << 20) + 1)},
        {"observation_png": b"GIF89a"},
        {"observation_png": b"\x89PNG\r\n\x1a\n" + bytes(1 << 20)},
    ],
)
def test_a_turn_outside_the_contract_becomes_no_reward(response: dict[str, Any]) -> None:
    hub = make_hub(Clock())
    provider = hub.attach(hello())
    outcomes: list[pb.StepResponse] = []
    hub.step(open_seat(hub, provider), "go", STEP_S, outcomes.append)
    (call,) = take(hub, provider)
    hub.reply(provider, stepped(call.call_id, **response))
    assert outcomes[0].failure.kind == pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT
    assert outcomes[0].reward == 0


@pytest.mark.parametrize(
    "reply",
    [
        pb.SessionReply(open=pb.OpenSessionResponse(max_turns=3)),
        pb.SessionReply(open=pb.OpenSessionResponse(session_id="s", max_turns=0)),
        pb.SessionReply(open=pb.OpenSessionResponse(session_id="s\n", max_turns=3)),
        pb.SessionReply(open=pb.OpenSessionResponse(session_id="taken", max_turns=3)),
        pb.SessionReply(open=pb.OpenSessionResponse(session_id="s", max_turns=3, observation="x" * ((1 << 20) + 1))),
        pb.SessionReply(step=pb.StepResponse()),
        pb.SessionReply(),
    ],
)
def test_an_opening_outside_the_contract(reply: pb.SessionReply) -> None:
    hub = make_hub(Clock())
    provider = hub.attach(hello())
    open_seat(hub, provider, "taken")
    outcomes: list[Any] = []
    hub.open("Count", {}, 1, STEP_S, outcomes.append)
    (call,) = take(hub, provider)
    reply.call_id = call.call_id
    hub.reply(provider, reply)
    seat, response = outcomes[0]
    assert seat is None
    assert response.failure.kind == pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT
    assert provider.free == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"provider_id": "short"}, "hello.provider_id"),
        ({"provider_id": "A" * 16}, "hello.provider_id"),
        ({"environments": []}, "hello.environments"),
        ({"capacity": 0}, "hello.capacity"),
        ({"capacity": 65_537}, "hello.capacity"),
        ({"session_ids": [""]}, r"hello.session_ids\[0\]"),
        ({"program": "x" * 129}, "hello.program"),
        ({"environments": [pb.EnvironmentDescription(tag="a b", max_turns=1)]}, r"hello.environments\[0\].tag"),
        ({"environments": [pb.EnvironmentDescription(tag="A")]}, r"hello.environments\[0\].max_turns"),
        (
            {"environments": [pb.EnvironmentDescription(tag="A", max_turns=1)] * 2},
            r"hello.environments\[1\].tag is 'A'; allowed: each tag once",
        ),
        (
            {"environments": [pb.EnvironmentDescription(tag="A", max_turns=1, render_formats=[7])]},
            r"hello.environments\[0\].render_formats",
        ),
        (
            {"environments": [pb.EnvironmentDescription(tag="A", max_turns=1, summary="a\nb")]},
            r"hello.environments\[0\].summary",
        ),
    ],
)
def test_a_hello_outside_the_contract(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RollwireError, match=field) as refused:
        make_hub(Clock()).attach(hello(**changes))
    assert refused.value.reason == "INVALID_FIELD"


class ProvidersComeAndGo(RuleBasedStateMachine):
    """Providers that answer, are cut, forget sessions, come back or stay away; callers that wait for outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.hub = make_hub(self.clock, disable_after_failures=10**6)
        self.alive: dict[str, Provider] = {}
        self.memory: dict[str, dict[str, int]] = {}  # provider name -> session id -> turns played
        self.openings: dict[str, dict[str, str]] = {}  # provider name -> request id -> session id
        self.asked: list[pb.SessionCall] = []
        self.waiting: dict[str, list[pb.SessionCall]] = {}
        self.outcomes: dict[int, list[Any]] = {}
        self.tickets = 0
        self.seats: list[Seat] = []
        self.busy: dict[Seat, int] = {}
        self.sessions = 0

    def ticket(self) -> tuple[int, Callable[[Any], None]]:
        self.tickets += 1
        self.outcomes[self.tickets] = []
        return self.tickets, self.outcomes[self.tickets].append

    names = st.sampled_from(["a", "b", "c", "d"])

    @rule(name=names, capacity=st.integers(1, 3), forgets=st.booleans())
    def attach(self, name: str, capacity: int, forgets: bool) -> None:
        memory = self.memory.setdefault(name, {})
        if forgets and memory:
            del memory[next(iter(memory))]
        try:
            provider = self.hub.attach(hello(name, max(capacity, len(memory), 1), tuple(memory)))
        except RollwireError as error:
            assert error.reason == "PROVIDERS_EXHAUSTED"
            assert len(self.hub.providers) == 3
            return
        self.alive[name] = provider
        self.waiting[name] = []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        provider = self.alive.pop(name)
        self.waiting.pop(name)
        self.hub.cut(provider, provider.stream)

    @rule(seconds=st.sampled_from([0.5, STEP_S, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.hub.tick()

    @rule()
    def open(self) -> None:
        number, deliver = self.ticket()
        try:
            provider = self.hub.open("Count", {}, 1, STEP_S, deliver)
        except RollwireError as error:
            assert error.reason == "SESSIONS_EXHAUSTED"
            assert all(one.free <= 0 for one in self.hub.providers.values())
            del self.outcomes[number]
            return
        assert all(one.free <= provider.free + 1 for one in self.hub.providers.values())

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.seats))
        if seat.ended or seat in self.busy:
            return
        number, deliver = self.ticket()
        self.busy[seat] = number
        self.hub.step(seat, "go", STEP_S, deliver)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.seats))
        self.seats.remove(seat)
        self.hub.close(seat)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.waiting[name] += take(self.hub, self.alive[name])

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data(), answer_lost=st.booleans())
    def answer(self, data: st.DataObject, answer_lost: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, calls in self.waiting.items() if calls)))
        call = self.waiting[name].pop(0)
        reply = self.played(name, call)
        if not answer_lost:
            self.hub.reply(self.alive[name], reply)

    def played(self, name: str, call: pb.SessionCall) -> pb.SessionReply:
        """What an honest provider does: each opening and each turn once, a repeat is answered as before."""
        memory = self.memory[name]
        if call.WhichOneof("call") == "open":
            known = self.openings.setdefault(name, {})
            if call.open.request_id not in known or known[call.open.request_id] not in memory:
                self.sessions += 1
                known[call.open.request_id] = f"s{self.sessions}"
                memory[known[call.open.request_id]] = 0
            return opened(call.call_id, known[call.open.request_id])
        if call.WhichOneof("call") == "close":
            memory.pop(call.close.session_id, None)
            return pb.SessionReply(call_id=call.call_id, close=pb.CloseSessionResponse())
        if call.step.session_id not in memory:
            error = pb.CallError(code=5, reason="UNKNOWN_SESSION", message="no such session")
            return pb.SessionReply(call_id=call.call_id, error=error)
        turns = memory[call.step.session_id]
        assert call.step.turn in (turns, turns - 1), "a turn is the next one or comes again"
        memory[call.step.session_id] = call.step.turn + 1
        return stepped(call.call_id, reward=float(call.step.turn))

    @invariant()
    def outcomes_come_once_and_are_right(self) -> None:
        for number, found in list(self.outcomes.items()):
            assert len(found) <= 1
            if not found:
                continue
            del self.outcomes[number]
            (outcome,) = found
            if isinstance(outcome, pb.StepResponse):
                seat = next(seat for seat, ticket in self.busy.items() if ticket == number)
                del self.busy[seat]
                if not outcome.HasField("failure"):
                    assert outcome.reward == seat.turns - 1
            else:
                seat, response = outcome
                assert (seat is None) == response.HasField("failure")
                if seat is not None:
                    self.seats.append(seat)

    @invariant()
    def credits_are_kept(self) -> None:
        for provider in self.hub.providers.values():
            opening = sum(call.kind == "open" for call in provider.unanswered.values())
            assert provider.opening == opening
            assert provider.unsent_bytes == sum(call.message.ByteSize() for call in provider.outbox)
            if provider.away_until_s is None:
                assert all(call.seat is None or call.seat.provider is provider for call in provider.unanswered.values())
        assert set(self.hub.tags) == ({"Count"} if self.hub.providers else set())

    def teardown(self) -> None:
        """In the end nobody waits for ever."""
        for provider in list(self.hub.providers.values()):
            self.hub.cut(provider, provider.stream)
        self.clock.now += LEASE_S
        self.hub.tick()
        self.outcomes_come_once_and_are_right()
        assert not self.outcomes
        assert not self.hub.providers


TestProvidersComeAndGo = ProvidersComeAndGo.TestCase
TestProvidersComeAndGo.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_another_description_than_that_of_a_provider_that_was_cut_off_says_how_long_it_is_kept() -> None:
    clock = Clock()
    hub = make_hub(clock)
    old = hub.attach(hello(program="old.py"))
    changed = hello("b", environments=[pb.EnvironmentDescription(tag="Count", summary="Anew.", max_turns=3)])
    with pytest.raises(RollwireError, match=r"\(old.py\) describes 'Count' in another way; run one version"):
        hub.attach(changed)
    hub.cut(old, old.stream)
    clock.now += 10
    with pytest.raises(RollwireError, match=r"\(old.py\) described 'Count' .* waited for for another 20 s: try again"):
        hub.attach(changed)
    clock.now += 20
    hub.tick()
    assert hub.attach(changed).free == 2
