"""Providers that dial in: who serves what, who plays which session, which call is unanswered. Pure: no I/O, no clock.

Invariants
- A provider never has more sessions and openings than the capacity that it named, unless it lowered it since.
- Each call is delivered exactly one outcome: the reply, a failure, or an error.
- A call that was unanswered when a stream was cut is sent again over the next one, under the same call id.
- A session is played by the provider that opened it, or it is lost; it never moves.
- A stream is read only as far as it owes answers; a provider that sends more than that is thrown out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import grpc

from rollwire.client.results import failure
from rollwire.environment.hub_checks import check_hello, checked_drawing, checked_open, checked_step
from rollwire.environment.hub_parts import Call, CallKind, OfferedTag, Provider, Seat
from rollwire.rpc.errors import Reason, RollwireError, exhausted, invalid_field, precondition
from rollwire.rpc.ids import new_id
from rollwire.v1 import environment_pb2 as pb

RETRY_AFTER_S: Final = 1.0
_PROVIDER_LEASE_S: Final = 3600
"""Lease that a provider's session gets: the server keeps the caller's own and closes the session when it ends."""

MAX_UNSENT_BYTES: Final = 64 << 20
"""Calls of more bytes than this that a provider's stream does not take: it is not reading."""

_LATE_S: Final = 1.0
"""A provider gets the call's time; its answer gets this much more to arrive."""


class ProtocolError(Exception):
    """A provider broke the contract; the text says how. It is thrown out."""


class Hub:
    """All providers of a server.

    Args:
        hosted: Tags that the server plays itself.
        max_providers: Most providers at once, those that are away included.
        lease_s: How long sessions outlive a cut stream.
        disable_after_failures: Episodes of a tag that fail in a row until it is disabled.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        hosted: Collection[str],
        max_providers: int,
        lease_s: float,
        disable_after_failures: int,
        clock: Callable[[], float],
    ) -> None:
        self.lease_s = lease_s
        self.providers: dict[str, Provider] = {}
        self.tags: dict[str, OfferedTag] = {}
        self._hosted = frozenset(hosted)
        self._max_providers = max_providers
        self._disable_after_failures = disable_after_failures
        self._clock = clock
        self._next_call_id = 1
        self._streams = 0

    def attach(self, hello: pb.ProviderHello) -> Provider:
        """Takes a provider in, or back; its stream is `provider.stream` from now on.

        Raises:
            RollwireError: The hello is outside the contract, or does not fit what is here.
        """
        check_hello(hello)
        known = self.providers.get(hello.provider_id)
        self._check_tags(hello, known)
        if known is None and len(self.providers) >= self._max_providers:
            raise exhausted(
                Reason.PROVIDERS_EXHAUSTED,
                f"this server takes {self._max_providers} providers and has them; stop one, or raise "
                "environment.providers.max_providers",
                retry_after_s=self.lease_s,
            )
        self._streams += 1
        descriptions = {description.tag: description for description in hello.environments}
        left: Collection[str] = ()
        if known is None:
            provider = Provider(hello.provider_id, hello.program, descriptions, hello.capacity, self._streams)
            provider.strangers = set(hello.session_ids)
            self.providers[provider.provider_id] = provider
        else:
            provider, left = known, known.descriptions
            self._take_back(provider, hello, descriptions)
        for tag, description in descriptions.items():
            offered = self.tags.setdefault(tag, OfferedTag(description))
            offered.description = description
            if provider not in offered.providers:
                offered.providers.append(provider)
        self._leave_tags(provider, set(left) - set(descriptions))
        self._close_strangers(provider)
        return provider

    def _check_tags(self, hello: pb.ProviderHello, known: Provider | None) -> None:
        for index, description in enumerate(hello.environments):
            tag = description.tag
            if tag in self._hosted:
                raise RollwireError(
                    grpc.StatusCode.ALREADY_EXISTS,
                    Reason.TAG_TAKEN,
                    f"hello.environments[{index}].tag is {tag!r}, which this server hosts itself; attach under another",
                    metadata={"environment_tag": tag},
                )
            offered = self.tags.get(tag)
            others = [] if offered is None else [one for one in offered.providers if one is not known]
            if offered is not None and others and offered.description != description:
                raise self._mismatch(tag, others)

    def _mismatch(self, tag: str, others: list[Provider]) -> RollwireError:
        who = f"another provider ({others[0].program or 'unnamed'})"
        message = f"{who} describes {tag!r} in another way; run one version of the program, or use another tag"
        ends_s = [one.away_until_s for one in others if one.away_until_s is not None]
        if len(ends_s) == len(others):  # its author may have ended it, and starts what was changed
            left_s = max(0, math.ceil(max(ends_s) - self._clock()))
            message = (
                f"{who} described {tag!r} in another way; it was cut off and is waited for for another {left_s} s: try "
                "again then, end providers with SIGTERM, or use another tag"
            )
        return precondition(Reason.DESCRIPTION_MISMATCH, message, environment_tag=tag)

    def _take_back(
        self, provider: Provider, hello: pb.ProviderHello, descriptions: Mapping[str, pb.EnvironmentDescription]
    ) -> None:
        """A provider attaches again: goes on with the sessions that both sides know, and sends calls again."""
        provider.program, provider.capacity = hello.program, hello.capacity
        provider.descriptions = dict(descriptions)
        provider.stream, provider.away_until_s, provider.draining = self._streams, None, False
        named = set(hello.session_ids)
        provider.strangers = named - set(provider.seats)
        for seat in [seat for session_id, seat in provider.seats.items() if session_id not in named]:
            self._lose(seat, "the provider came back without this session")
        for call_id in [call_id for call_id, call in provider.unanswered.items() if call.kind == "close"]:
            del provider.unanswered[call_id]  # what it still has of them are strangers
        provider.outbox = deque(provider.unanswered.values())
        provider.unsent_bytes = sum(call.message.ByteSize() for call in provider.outbox)
        provider.owed = 0

    def cut(self, provider: Provider, stream: int) -> None:
        """A stream has ended: the sessions wait for the provider, unless it was leaving."""
        if provider.stream != stream or self.providers.get(provider.provider_id) is not provider:
            return
        if provider.draining:
            self._remove(provider, "the provider has left")
        else:
            provider.away_until_s = self._clock() + self.lease_s
            provider.outbox.clear()
            provider.unsent_bytes = 0

    def evict(self, provider: Provider, cause: str) -> None:
        """Throws a provider out at once: its sessions are lost."""
        if self.providers.get(provider.provider_id) is provider:
            self._remove(provider, f"the provider broke the contract: {cause}")

    def drain(self, provider: Provider) -> None:
        """The provider wants no new sessions."""
        provider.draining = True

    def set_capacity(self, provider: Provider, capacity: int) -> None:
        """The provider serves more or fewer sessions from now on. Raises `ProtocolError`."""
        if capacity > 65_536:
            raise ProtocolError(f"capacity is {capacity}; allowed: 0 to 65536")
        provider.capacity = capacity

    def open(
        self, tag: str, options: Mapping[str, Any], seed: int, timeout_s: float, deliver: Callable[[Any], None]
    ) -> Provider:
        """Has the provider with most credits open a session; delivers (seat or None, response) or a `RollwireError`.

        Returns:
            The provider that was chosen.

        Raises:
            RollwireError: FAILED_PRECONDITION when the tag is disabled, RESOURCE_EXHAUSTED without a credit.
        """
        offered = self.tags.get(tag)
        if offered is not None and offered.disabled:
            raise precondition(
                Reason.ENVIRONMENT_DISABLED,
                f"environment {tag} is disabled: {offered.failures_in_a_row} episodes in a row failed, the last one "
                f"with {offered.last_failure}; mend it, stop all its providers and start them again",
                environment_tag=tag,
            )
        provider = max(offered.providers, key=lambda one: one.free, default=None) if offered is not None else None
        if provider is None or provider.free <= 0:
            raise exhausted(
                Reason.SESSIONS_EXHAUSTED,
                f"no provider of {tag} has a free session; wait for sessions to end, or start another provider",
                retry_after_s=RETRY_AFTER_S,
                environment_tag=tag,
            )
        request = pb.OpenSessionRequest(request_id=new_id("open"), environment_tag=tag, seed=seed)
        request.lease.FromSeconds(_PROVIDER_LEASE_S)
        if options:
            request.options.update(options)
        provider.opening += 1
        self._call(provider, "open", tag, timeout_s, deliver, open=request)
        return provider

    def step(self, seat: Seat, action: str, timeout_s: float, deliver: Callable[[pb.StepResponse], None]) -> None:
        """Has a turn played; delivers the response, in which a failure is data."""
        if seat.lost is not None:
            seat.ended = True
            deliver(pb.StepResponse(failure=seat.lost))
            return
        if seat.provider.unsent_bytes > MAX_UNSENT_BYTES:
            self._failed_turn(seat, _lost("the provider does not read its stream"), deliver)
            return
        request = pb.StepRequest(session_id=seat.session_id, turn=seat.turns, action=action)
        self._call(seat.provider, "step", seat.tag, timeout_s, deliver, seat, step=request)

    def render(
        self, seat: Seat, render_format: pb.RenderFormat.ValueType, timeout_s: float, deliver: Callable[[Any], None]
    ) -> None:
        """Has the present state drawn; delivers the response or a `RollwireError`."""
        if seat.lost is not None:
            deliver(_no_drawing(seat.tag, seat.lost))
            return
        request = pb.RenderRequest(session_id=seat.session_id, format=render_format)
        self._call(seat.provider, "render", seat.tag, timeout_s, deliver, seat, render=request)

    def close(self, seat: Seat) -> None:
        """Ends a session: its credit is free, the provider is told, and whoever waits for it gets LOST."""
        if seat.provider.seats.get(seat.session_id) is not seat:
            return
        self._lose(seat, "the session was closed")
        if seat.provider.away_until_s is None:
            self._tell_closed(seat.provider, seat.session_id)

    def take(self, provider: Provider, stream: int, max_bytes: int) -> list[pb.SessionCall]:
        """Returns calls that its stream has to send now, oldest first, together at most about `max_bytes`."""
        taken: list[pb.SessionCall] = []
        size = 0
        while provider.stream == stream and provider.outbox and (not taken or size < max_bytes):
            call = provider.outbox.popleft()
            provider.unsent_bytes -= call.message.ByteSize()
            if call.message.call_id in provider.unanswered:  # not given up meanwhile
                taken.append(call.message)
                size += call.message.ByteSize()
        provider.owed += len(taken)
        return taken

    def reply(self, provider: Provider, reply: pb.SessionReply) -> None:
        """Takes an answer of a provider.

        Raises:
            ProtocolError: Nothing was asked for under this id, or more is answered than was asked.
        """
        if not 0 < reply.call_id < self._next_call_id:
            raise ProtocolError(f"a reply has the call_id {reply.call_id}, which no call had")
        if provider.owed <= 0:
            raise ProtocolError("more replies than calls")
        provider.owed -= 1
        call = provider.unanswered.pop(reply.call_id, None)
        if call is None:
            return  # given up meanwhile
        kind = reply.WhichOneof("reply")
        if call.kind == "open":
            self._opened(provider, call, reply, kind)
        elif call.kind == "step":
            self._stepped(call, reply, kind)
        elif call.kind == "render" and call.deliver is not None:
            call.deliver(self._drawn(call, reply, kind))

    def tick(self) -> None:
        """Gives up calls whose time is over and providers whose lease is."""
        now_s = self._clock()
        for provider in list(self.providers.values()):
            if provider.away_until_s is not None and provider.away_until_s <= now_s:
                self._remove(provider, f"the provider was cut off and did not come back within {self.lease_s:g} s")
                continue
            for call in [call for call in provider.unanswered.values() if call.deadline_s <= now_s]:
                self._give_up(provider, call)

    def _call(
        self,
        provider: Provider,
        kind: CallKind,
        tag: str,
        timeout_s: float,
        deliver: Callable[[Any], None] | None,
        seat: Seat | None = None,
        **request: Any,
    ) -> None:
        message = pb.SessionCall(call_id=self._next_call_id, **request)
        message.timeout.FromNanoseconds(int(timeout_s * 1e9))
        self._next_call_id += 1
        call = Call(message, kind, tag, self._clock() + timeout_s + _LATE_S, deliver, seat)
        provider.unanswered[message.call_id] = call
        if provider.away_until_s is None:
            provider.outbox.append(call)
            provider.unsent_bytes += message.ByteSize()

    def _opened(self, provider: Provider, call: Call, reply: pb.SessionReply, kind: str | None) -> None:
        provider.opening -= 1
        outcome: tuple[Seat | None, pb.OpenSessionResponse] | RollwireError
        if kind == "error":
            outcome = self._refused_opening(call, reply.error)
        else:
            problem = checked_open(reply.open) if kind == "open" else _wrong_kind(kind)
            if problem is None and reply.open.session_id in provider.seats:
                problem = _invalid(f"session_id {reply.open.session_id!r} is in use already")
            if problem is not None:
                if call.deliver is not None:  # else it was counted when it was given up
                    self._count_failure(call.tag, problem)
                outcome = None, pb.OpenSessionResponse(failure=problem)
            else:
                seat = Seat(provider, call.tag, reply.open.session_id, reply.open.max_turns)
                provider.strangers.discard(seat.session_id)
                if call.deliver is None:
                    self._tell_closed(provider, seat.session_id)
                else:
                    provider.seats[seat.session_id] = seat
                reply.open.ClearField("lease")
                outcome = seat, reply.open
        if call.deliver is not None:
            call.deliver(outcome)
        self._close_strangers(provider)

    def _refused_opening(self, call: Call, error: pb.CallError) -> tuple[None, pb.OpenSessionResponse] | RollwireError:
        """An error in place of a session: of the caller's options, of a full provider, or else a failure."""
        message = f"the provider of {call.tag} refuses: {error.message[:1000]}"
        if error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
            return RollwireError(
                grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, message, fields={"options": message}
            )
        if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
            return exhausted(Reason.SESSIONS_EXHAUSTED, message, RETRY_AFTER_S, environment_tag=call.tag)
        problem = failure(pb.ENVIRONMENT_FAILURE_KIND_ERROR, error.reason or "CallError", message)
        self._count_failure(call.tag, problem)
        return None, pb.OpenSessionResponse(failure=problem)

    def _stepped(self, call: Call, reply: pb.SessionReply, kind: str | None) -> None:
        seat = call.seat
        if call.deliver is None or seat is None:
            return
        if kind == "error":
            lost = reply.error.reason == Reason.UNKNOWN_SESSION
            failed = pb.ENVIRONMENT_FAILURE_KIND_LOST if lost else pb.ENVIRONMENT_FAILURE_KIND_ERROR
            problem: pb.EnvironmentFailure | None = failure(
                failed, reply.error.reason or "CallError", reply.error.message
            )
        else:
            problem = checked_step(reply.step) if kind == "step" else _wrong_kind(kind)
        if problem is not None:
            self._failed_turn(seat, problem, call.deliver)
            return
        response = reply.step
        seat.turns += 1
        if seat.turns >= seat.max_turns and not response.terminated:
            response.truncated = True
        if response.terminated or response.truncated:
            seat.ended = True
            if (offered := self.tags.get(seat.tag)) is not None:
                offered.failures_in_a_row = 0
        call.deliver(response)

    def _failed_turn(
        self, seat: Seat, problem: pb.EnvironmentFailure, deliver: Callable[[pb.StepResponse], None] | None
    ) -> None:
        seat.ended = True
        seat.lost = problem
        if problem.kind != pb.ENVIRONMENT_FAILURE_KIND_LOST:
            self._count_failure(seat.tag, problem)
        if deliver is not None:
            deliver(pb.StepResponse(failure=problem))

    def _drawn(self, call: Call, reply: pb.SessionReply, kind: str | None) -> pb.RenderResponse | RollwireError:
        if kind == "error":
            return _no_drawing(call.tag, _invalid(reply.error.message))
        problem = checked_drawing(reply.render, call.message.render.format) if kind == "render" else _wrong_kind(kind)
        return reply.render if problem is None else _no_drawing(call.tag, problem)

    def _give_up(self, provider: Provider, call: Call) -> None:
        """The time of a call is over. An opening keeps its credit, because the provider may still be at it."""
        away = provider.away_until_s is not None
        problem = (
            _lost("the provider is cut off and has not come back")
            if away
            else failure(pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT, "Timeout", "the provider did not answer in time")
        )
        if call.kind == "open":
            call.deadline_s = float("inf")
            if call.deliver is not None:
                if not away:
                    self._count_failure(call.tag, problem)
                deliver, call.deliver = call.deliver, None
                deliver((None, pb.OpenSessionResponse(failure=problem)))
            return
        del provider.unanswered[call.message.call_id]
        if call.kind == "step" and call.seat is not None:
            self._failed_turn(call.seat, problem, call.deliver)
        elif call.kind == "render" and call.deliver is not None:
            call.deliver(_no_drawing(call.tag, problem))

    def _lose(self, seat: Seat, cause: str) -> None:
        """Ends a session without its provider."""
        provider = seat.provider
        del provider.seats[seat.session_id]
        if seat.lost is None:
            seat.lost = _lost(cause)
        for call in [call for call in provider.unanswered.values() if call.seat is seat]:
            del provider.unanswered[call.message.call_id]
            if call.kind == "step":
                self._failed_turn(seat, seat.lost, call.deliver)
            elif call.deliver is not None:
                call.deliver(_no_drawing(seat.tag, seat.lost))

    def _remove(self, provider: Provider, cause: str) -> None:
        del self.providers[provider.provider_id]
        self._leave_tags(provider, provider.descriptions)
        provider.away_until_s = self._clock()
        for seat in list(provider.seats.values()):
            self._lose(seat, cause)
        calls = list(provider.unanswered.values())
        provider.unanswered.clear()
        provider.outbox.clear()
        problem = _lost(cause)
        for call in calls:
            if call.kind == "open" and call.deliver is not None:
                call.deliver((None, pb.OpenSessionResponse(failure=problem)))

    def _leave_tags(self, provider: Provider, tags: Collection[str]) -> None:
        for tag in tags:
            offered = self.tags[tag]
            offered.providers.remove(provider)
            if not offered.providers:
                del self.tags[tag]

    def _close_strangers(self, provider: Provider) -> None:
        """Closes sessions that nobody plays, unless the answer that makes one known may still come."""
        if provider.strangers and not provider.opening:
            for session_id in provider.strangers - set(provider.seats):
                self._tell_closed(provider, session_id)
            provider.strangers.clear()

    def _tell_closed(self, provider: Provider, session_id: str) -> None:
        request = pb.CloseSessionRequest(session_id=session_id)
        self._call(provider, "close", "", 60.0, None, close=request)

    def _count_failure(self, tag: str, problem: pb.EnvironmentFailure) -> None:
        offered = self.tags.get(tag)
        if offered is not None:
            offered.failures_in_a_row += 1
            offered.last_failure = f"{problem.type}: {problem.message}"
            offered.disabled |= offered.failures_in_a_row >= self._disable_after_failures


def provider_replaced() -> RollwireError:
    """Returns the error for a stream whose provider attached again."""
    return RollwireError(
        grpc.StatusCode.ABORTED,
        Reason.PROVIDER_REPLACED,
        "this provider_id attached again over another stream; two programs must not share one",
    )


def broken_contract(error: ProtocolError) -> RollwireError:
    """Returns the error for a provider that is thrown out."""
    return invalid_field("replies", str(error), "one reply to each call, as in environment.proto")


def _lost(cause: str) -> pb.EnvironmentFailure:
    return failure(pb.ENVIRONMENT_FAILURE_KIND_LOST, "Lost", cause)


def _invalid(message: str) -> pb.EnvironmentFailure:
    return failure(pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT, "InvalidResult", message)


def _wrong_kind(kind: str | None) -> pb.EnvironmentFailure:
    return _invalid(f"the provider answered the call with {kind or 'nothing'}")


def _no_drawing(tag: str, problem: pb.EnvironmentFailure) -> RollwireError:
    return precondition(
        Reason.RENDER_UNSUPPORTED,
        f"environment {tag} failed to draw itself: {problem.type}: {problem.message}",
        environment_tag=tag,
    )
