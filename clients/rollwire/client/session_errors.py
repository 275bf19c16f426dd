"""What the session table raises, as errors of the contract."""

from __future__ import annotations

from rollwire.client.sessions import EpisodeEndedError, SessionError, WrongTurnError
from rollwire.rpc.errors import Reason, RollwireError, not_found, precondition


def refusal(error: SessionError, turn: int = 0) -> RollwireError:
    """Returns the error of the contract for what the session table raised.

    Args:
        error: What it raised.
        turn: Turn that was asked for, if one was.
    """
    if isinstance(error, EpisodeEndedError):
        return precondition(
            Reason.EPISODE_ENDED, f"turn {turn} cannot be played: the episode has ended; open a new session"
        )
    if isinstance(error, WrongTurnError):
        return precondition(
            Reason.WRONG_TURN,
            f"turn is {turn}; allowed: {error.next_turn} (the next one), or the latest one for its reply",
            turn=str(turn),
            next_turn=str(error.next_turn),
        )
    return not_found(Reason.UNKNOWN_SESSION, "no such session: it was closed, or its lease ended; open a new one")
