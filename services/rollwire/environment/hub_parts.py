"""What the hub keeps: providers, their seats, and the calls that they have not answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rollwire.v1 import environment_pb2 as pb

CallKind = Literal["open", "step", "render", "close"]


@dataclass(eq=False, slots=True)
class Seat:
    """A session that a provider plays.

    Attributes:
        provider: Who plays it.
        tag: Environment.
        session_id: Its name at the provider.
        max_turns: Turn limit.
        turns: Turns played.
        ended: No turn can follow.
        lost: Why it cannot be played any more, once it cannot.
    """

    provider: Provider
    tag: str
    session_id: str
    max_turns: int
    turns: int = 0
    ended: bool = False
    lost: pb.EnvironmentFailure | None = None


@dataclass(eq=False, slots=True)
class Call:
    """A call that a provider has to answer.

    Attributes:
        message: As it goes over the wire.
        kind: What is asked for.
        tag: Environment.
        deadline_s: When it is given up, on the hub's clock.
        deliver: Takes the outcome, once; None when nobody waits any more.
        seat: The session, unless it is being opened.
    """

    message: pb.SessionCall
    kind: CallKind
    tag: str
    deadline_s: float
    deliver: Callable[[Any], None] | None
    seat: Seat | None = None


@dataclass(eq=False)
class Provider:
    """A program that has attached.

    Attributes:
        provider_id: Its secret name.
        program: What it calls itself, for logs.
        descriptions: What it serves, by tag.
        capacity: Sessions that it serves at once.
        stream: Number of its present or latest stream.
        away_until_s: Its sessions are kept until then; None while it is attached.
        draining: It takes no new sessions.
        seats: Its sessions, by id.
        unanswered: Calls in the order in which they were made, by call id.
        outbox: Those among them that its stream has not taken.
        unsent_bytes: Size of what is in `outbox`.
        opening: Openings among the unanswered calls.
        owed: Answers that its stream owes; more than this is a flood.
        strangers: Sessions that it named at a reconnect and that are not the hub's; closed once openings are answered.
    """

    provider_id: str
    program: str
    descriptions: dict[str, pb.EnvironmentDescription]
    capacity: int
    stream: int
    away_until_s: float | None = None
    draining: bool = False
    seats: dict[str, Seat] = field(default_factory=dict)
    unanswered: dict[int, Call] = field(default_factory=dict)
    outbox: deque[Call] = field(default_factory=deque)
    unsent_bytes: int = 0
    owed: int = 0
    strangers: set[str] = field(default_factory=set)
    opening: int = 0

    @property
    def free(self) -> int:
        """Credits: sessions that can be opened now."""
        if self.draining or self.away_until_s is not None:
            return 0
        return self.capacity - len(self.seats) - self.opening


@dataclass(eq=False)
class OfferedTag:
    """A tag that providers serve.

    Attributes:
        description: The same from all of them.
        providers: Who serves it, attached or away.
        failures_in_a_row: Episodes that failed since one ended well.
        last_failure: What the latest of them said.
        disabled: So many failed that nothing is opened any more, until other providers come.
    """

    description: pb.EnvironmentDescription
    providers: list[Provider] = field(default_factory=list)
    failures_in_a_row: int = 0
    last_failure: str = ""
    disabled: bool = False
