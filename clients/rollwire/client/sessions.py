"""Sessions: leases, idempotent opening and idempotent turns. A pure state machine: no I/O, no threads, injected clock.

Invariants
- At most `capacity` sessions exist, starting ones included.
- A turn is played once: a repeat of the latest turn gets its reply, or waits for it while it is being played.
- A session that is being played does not expire; its lease starts anew when the turn ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from rollwire.rpc.ids import new_secret

OpenedT = TypeVar("OpenedT")
ReplyT = TypeVar("ReplyT")


class SessionError(Exception):
    """The request does not fit the state of the sessions."""


class CapacityReachedError(SessionError):
    """No more sessions can be opened."""


class RequestIdReusedError(SessionError):
    """The request id belongs to a session that was opened with other settings."""


class UnknownSessionError(SessionError):
    """The session was closed, expired, or never existed."""


class EpisodeEndedError(SessionError):
    """The turn follows the last one of a finished episode."""


class WrongTurnError(SessionError):
    """The turn is neither the next nor the latest one.

    Attributes:
        next_turn: The turn that would be played next.
    """

    def __init__(self, next_turn: int) -> None:
        super().__init__(next_turn)
        self.next_turn = next_turn


class Phase(Enum):
    """What a session is doing."""

    STARTING = auto()
    """The environment is being reset."""

    WAITING = auto()
    """The next turn can be played."""

    PLAYING = auto()
    """A turn is being played."""

    ENDED = auto()
    """The episode is over; the last reply can still be asked for."""


class Admission(Enum):
    """What the caller has to do with a request."""

    RUN = auto()
    """It is new: do it and report the outcome."""

    WAIT = auto()
    """The same is being done already: share its outcome."""

    REPEAT = auto()
    """It was done before: answer as before."""


@dataclass(eq=False, slots=True)
class Session(Generic[OpenedT, ReplyT]):
    """One session; only the table changes it.

    Attributes:
        session_id: Bearer secret of the episode.
        request_id: Idempotency key of its opening.
        fingerprint: Digest of what was asked for at the opening.
        lease_s: Length of the lease.
        expires_at_s: When the lease ends, on the table's clock.
        opened: Answer of the opening, once started.
        turns: Turns begun so far.
        reply: Reply of the latest turn, unless that is being played.
        phase: What it is doing.
        closed: It was closed or has expired.
    """

    session_id: str
    request_id: str
    fingerprint: bytes
    lease_s: float
    expires_at_s: float
    opened: OpenedT | None = None
    turns: int = 0
    reply: ReplyT | None = None
    phase: Phase = Phase.STARTING
    closed: bool = False

    @property
    def busy(self) -> bool:
        """Whether the environment is being used right now."""
        return self.phase in (Phase.STARTING, Phase.PLAYING)


class SessionTable(Generic[OpenedT, ReplyT]):
    """All sessions of a server."""

    def __init__(
        self, capacity: int, clock: Callable[[], float], new_session_id: Callable[[], str] = new_secret
    ) -> None:
        """Creates an empty table.

        Args:
            capacity: Most sessions at once.
            clock: Monotonic time in seconds.
            new_session_id: Makes unguessable identifiers.
        """
        self.capacity = capacity
        self._clock = clock
        self._new_session_id = new_session_id
        self._by_id: dict[str, Session[OpenedT, ReplyT]] = {}
        self._by_request: dict[str, Session[OpenedT, ReplyT]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def session_ids(self) -> list[str]:
        """Identifiers of the sessions that have started."""
        return [session.session_id for session in self._by_id.values() if session.phase is not Phase.STARTING]

    def open(self, request_id: str, fingerprint: bytes, lease_s: float) -> tuple[Admission, Session[OpenedT, ReplyT]]:
        """Opens a session, or finds the one that the same request opened before.

        After `RUN` the caller reports `started` or `forget`. When the table is full, the caller reaps first.

        Raises:
            RequestIdReusedError: The request id was used with another fingerprint.
            CapacityReachedError: The table is full.
        """
        known = self._by_request.get(request_id)
        if known is not None and not self._expired(known):
            if known.fingerprint != fingerprint:
                raise RequestIdReusedError(request_id)
            self._renew(known)
            return (Admission.WAIT if known.phase is Phase.STARTING else Admission.REPEAT), known
        if len(self._by_id) >= self.capacity:
            raise CapacityReachedError(self.capacity)
        session: Session[OpenedT, ReplyT] = Session(
            self._new_session_id(), request_id, fingerprint, lease_s, self._clock() + lease_s
        )
        self._by_id[session.session_id] = session
        self._by_request[request_id] = session
        return Admission.RUN, session

    def started(self, session: Session[OpenedT, ReplyT], opened: OpenedT) -> None:
        """Records the answer of an opening: the first turn can be played."""
        session.opened = opened
        session.phase = Phase.WAITING
        self._renew(session)

    def find(self, session_id: str) -> Session[OpenedT, ReplyT]:
        """Returns a started session and renews its lease.

        Raises:
            UnknownSessionError: There is none.
        """
        session = self._by_id.get(session_id)
        if session is None or session.phase is Phase.STARTING:
            raise UnknownSessionError
        now_s = self._clock()
        if session.expires_at_s <= now_s and not session.busy:
            raise UnknownSessionError
        session.expires_at_s = now_s + session.lease_s
        return session

    def begin_turn(self, session_id: str, turn: int) -> tuple[Admission, Session[OpenedT, ReplyT]]:
        """Asks to play a turn; after `RUN` the caller reports `end_turn`, after `REPEAT` it answers `session.reply`.

        Raises:
            UnknownSessionError: There is no such session.
            EpisodeEndedError: The episode is over.
            WrongTurnError: The turn is neither the next nor the latest one.
        """
        session = self.find(session_id)
        if turn == session.turns - 1:
            return (Admission.WAIT if session.phase is Phase.PLAYING else Admission.REPEAT), session
        if turn != session.turns or session.phase is Phase.PLAYING:
            raise WrongTurnError(session.turns)
        if session.phase is Phase.ENDED:
            raise EpisodeEndedError
        session.turns += 1
        session.reply = None
        session.phase = Phase.PLAYING
        return Admission.RUN, session

    def end_turn(self, session: Session[OpenedT, ReplyT], reply: ReplyT, *, ended: bool) -> None:
        """Records the reply of the turn that was being played."""
        session.reply = reply
        session.phase = Phase.ENDED if ended else Phase.WAITING
        session.expires_at_s = self._clock() + session.lease_s

    def renew(self, session_id: str, lease_s: float | None) -> Session[OpenedT, ReplyT]:
        """Renews a lease, with another length if one is given.

        Raises:
            UnknownSessionError: There is no such session.
        """
        session = self.find(session_id)
        if lease_s is not None:
            session.lease_s = lease_s
            self._renew(session)
        return session

    def close(self, session_id: str) -> Session[OpenedT, ReplyT] | None:
        """Removes a session and returns it; None when there is none, or it is still starting."""
        session = self._by_id.get(session_id)
        if session is None or session.phase is Phase.STARTING:
            return None
        self.forget(session)
        return session

    def forget(self, session: Session[OpenedT, ReplyT]) -> None:
        """Removes a session, for instance because its start failed."""
        session.closed = True
        self._by_id.pop(session.session_id, None)
        if self._by_request.get(session.request_id) is session:
            del self._by_request[session.request_id]

    def reap(self) -> list[Session[OpenedT, ReplyT]]:
        """Removes the sessions whose lease has ended, and returns them."""
        expired = [session for session in self._by_id.values() if self._expired(session)]
        for session in expired:
            self.forget(session)
        return expired

    def close_all(self) -> list[Session[OpenedT, ReplyT]]:
        """Removes all sessions, and returns them."""
        everyone = list(self._by_id.values())
        for session in everyone:
            self.forget(session)
        return everyone

    def _renew(self, session: Session[OpenedT, ReplyT]) -> None:
        session.expires_at_s = self._clock() + session.lease_s

    def _expired(self, session: Session[OpenedT, ReplyT]) -> bool:
        return session.expires_at_s <= self._clock() and not session.busy
