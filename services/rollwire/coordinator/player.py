"""Plays one group: finds a server, asks for the episodes, and asks again for those that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc

from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.groups import GroupPlan, GroupProgress, Tally
from rollwire.coordinator.intake import ProtocolError
from rollwire.coordinator.rollout_pool import RolloutPool, RolloutServer
from rollwire.coordinator.weight_push import LOST_CODES
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.logs import get_logger
from rollwire.v1 import trajectory_pb2, weights_pb2

_log = get_logger(__name__)
_FULL: Final = (Reason.EPISODES_EXHAUSTED, Reason.REQUESTS_EXHAUSTED)


class _BusyError(Exception):
    """The server has no room now; `retry_after_s` says when to ask again."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class GroupPlayer:
    """Plays groups on the servers of a pool.

    Args:
        pool: The rollout servers.
        fence: Identifies this coordinator.
        group_timeout_s: Longest time of one call.
        budgets: Bounds of retries.
        on_episode: Called for every result.
    """

    def __init__(
        self,
        pool: RolloutPool,
        fence: trajectory_pb2.Fence,
        group_timeout_s: float,
        budgets: Budgets,
        on_episode: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._fence = fence
        self._group_timeout_s = group_timeout_s
        self._budgets = budgets
        self._on_episode = on_episode

    async def play(
        self, plan: GroupPlan, tally: Tally, required_version: weights_pb2.WeightVersion | None
    ) -> GroupProgress:
        """Plays a group until every episode has a trajectory or attempts run out.

        Args:
            plan: The group.
            tally: Where its episodes are counted.
            required_version: Version that must play it; None for whatever the server serves.

        Raises:
            RunError: No server is left, a server refused the request, or it broke the contract.
        """
        progress = GroupProgress(plan, self._budgets.attempts, tally)
        avoid: RolloutServer | None = None
        busy_until: float | None = None  # the wait for a place in the pool is no refusal
        while True:
            episodes = len(progress.missing)
            server = await self._pool.acquire(episodes, avoid)
            try:
                await self._attempt(server, progress, required_version)
            except _BusyError as busy:
                now = asyncio.get_running_loop().time()
                busy_until = now + self._group_timeout_s if busy_until is None else busy_until
                if now > busy_until:
                    raise RunError(
                        f"the rollout server at {server.client.target} had no room for {episodes} episodes during "
                        f"timeouts.group_s={self._group_timeout_s:g} s; is another run using it?"
                    ) from busy
                await asyncio.sleep(max(busy.retry_after_s, self._budgets.poll_s))
                continue
            finally:
                self._pool.release(server, episodes)
            busy_until = None
            if progress.complete or progress.exhausted:
                return progress
            last = progress.failures[-1]
            _log.warning("episodes failed, asking again", group=plan.group_id, reason=last.reason, cause=last.message)
            avoid = server
            await asyncio.sleep(self._budgets.retry_delay_s * 2 ** (progress.attempt - 1))

    async def _attempt(
        self, server: RolloutServer, progress: GroupProgress, required_version: weights_pb2.WeightVersion | None
    ) -> None:
        """Asks one server for all missing episodes; afterwards each has a result."""
        plan = progress.plan
        request = plan.request(self._fence, progress.attempt, progress.begin_attempt(), required_version)
        try:
            async for response in server.client.run_group(request, timeout_s=self._group_timeout_s):
                progress.add(response)
                self._on_episode()
            progress.fail_pending(
                trajectory_pb2.FAILURE_REASON_ROLLOUT_LOST, "the rollout server ended the stream without this result"
            )
        except RollwireError as error:
            self._settle(server, progress, error)
        except ProtocolError as error:
            raise RunError(f"the rollout server at {server.client.target} broke the contract: {error}") from error
        except asyncio.CancelledError:
            progress.fail_pending(trajectory_pb2.FAILURE_REASON_CANCELLED, "the run was ended")
            raise
        progress.end_attempt()

    def _settle(self, server: RolloutServer, progress: GroupProgress, error: RollwireError) -> None:
        """Turns the error of a call into failures of the episodes that have no result, or raises what ends the run."""
        target = server.client.target
        if error.reason in _FULL and progress.in_attempt == len(progress.missing):
            progress.withdraw()
            raise _BusyError(error.retry_after_s or 0.0)
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            reason = trajectory_pb2.FAILURE_REASON_DEADLINE_EXCEEDED
        elif error.reason in (Reason.NO_WEIGHTS, Reason.WRONG_VERSION):
            self._pool.report_lost(server, error.message)
            reason = trajectory_pb2.FAILURE_REASON_ROLLOUT_LOST
        elif error.reason == Reason.INTERNAL:
            reason = trajectory_pb2.FAILURE_REASON_GENERATION_ERROR
        elif error.code in LOST_CODES:
            self._pool.report_lost(server, error.message)
            reason = trajectory_pb2.FAILURE_REASON_ROLLOUT_LOST
        else:
            raise RunError(f"the rollout server at {target} refused group {progress.plan.group_id}: {error}") from error
        progress.fail_pending(reason, f"{target}: {error.message}")
