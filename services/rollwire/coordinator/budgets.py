"""How often and how long the coordinator tries again before it gives up. Nothing is retried without a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.groups import reason_name
from rollwire.v1 import trajectory_pb2


@dataclass(frozen=True)
class Budgets:
    """Bounds of all retries.

    Attributes:
        attempts: Times that an episode is requested before its group is given up.
        retry_delay_s: Pause before the second attempt; doubles with each further one.
        lost_s: How long a server that was lost may stay away.
        poll_s: Pause between two looks at a server that was lost or is busy.
        watch_s: Pause between two looks at the sessions of agents.
    """

    attempts: int = 3
    retry_delay_s: float = 0.5
    lost_s: float = 60.0
    poll_s: float = 0.5
    watch_s: float = 5.0


class FailureBudget:
    """Ends the run when groups keep failing: counts groups given up in a row, whatever they play. Pure.

    Args:
        limit: Groups in a row that may be given up; one more ends the run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._in_a_row = 0

    def succeeded(self) -> None:
        """Notes a complete group."""
        self._in_a_row = 0

    def failed(self, description: str, failures: Sequence[trajectory_pb2.EpisodeFailure], cause: str = "") -> None:
        """Notes a group that was given up.

        Args:
            description: What was given up, for the text.
            failures: Its failed episodes.
            cause: Why, where it was not for them.

        Raises:
            RunError: The limit is passed; the text has the last failure's reason and message.
        """
        self._in_a_row += 1
        if self._in_a_row <= self.limit:
            return
        why = cause or explain(failures)
        raise RunError(f"{self._in_a_row} groups in a row failed, the last one {description}: {why}")


def explain(failures: Sequence[trajectory_pb2.EpisodeFailure]) -> str:
    """Returns why the last of some episodes failed, in one line, and what to do."""
    why = f"{reason_name(failures[-1].reason)}: {failures[-1].message}" if failures else "no reason was given"
    return f"{' '.join(why.split())}; the servers' logs have the details: mend the cause and start again"
