"""One session on an environment server: open, step, keep alive, close; every fault becomes an `EpisodeFailed`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from rollwire.rollout.environments import EnvironmentPool, EnvironmentServer
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.ids import METRIC_PATTERN, new_id
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2, trajectory_pb2

_log = get_logger(__name__)
LEASE_S: Final = 60
_RENEW_S: Final = LEASE_S / 3
_CLOSE_TIMEOUT_S: Final = 5.0
_FINISH_S: Final = 2 * _CLOSE_TIMEOUT_S
_OPEN_ATTEMPTS: Final = 30
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 2.0
_MAX_METRICS: Final = 256
_MAX_MESSAGE: Final = 4096
_KINDS: Final = {
    environment_pb2.ENVIRONMENT_FAILURE_KIND_TIMEOUT: trajectory_pb2.FAILURE_REASON_ENVIRONMENT_TIMEOUT,
    environment_pb2.ENVIRONMENT_FAILURE_KIND_LOST: trajectory_pb2.FAILURE_REASON_ENVIRONMENT_LOST,
}


class EpisodeFailed(Exception):  # noqa: N818 (an outcome, as the contract names it)
    """The episode has no result.

    Attributes:
        reason: Why.
        message: One line for people.
    """

    def __init__(self, reason: trajectory_pb2.FailureReason.ValueType, message: str) -> None:
        line = " ".join(message.split())[:_MAX_MESSAGE]
        super().__init__(line)
        self.reason = reason
        self.message = line


class Session:
    """An open session.

    Attributes:
        server: Where it lives.
        description: The environment.
        start: What opening answered.
    """

    def __init__(
        self,
        server: EnvironmentServer,
        description: environment_pb2.EnvironmentDescription,
        start: environment_pb2.OpenSessionResponse,
        step_timeout_s: float,
    ) -> None:
        self.server = server
        self.description = description
        self.start = start
        self._step_timeout_s = step_timeout_s

    async def step(self, turn: int, action: str) -> environment_pb2.StepResponse:
        """Plays a turn.

        Raises:
            EpisodeFailed: The environment or its server failed, or answered something outside the contract.
        """
        try:
            answer = await self.server.calls.step(self.start.session_id, turn, action, timeout_s=self._step_timeout_s)
        except RollwireError as error:
            raise _failed(error, self.server.client.target) from error
        _check_failure(answer)
        _check_step(answer)
        return answer

    async def keep_alive(self) -> None:
        """Renews the lease for ever; a session that is gone is found out by the next step."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                await self.server.calls.renew_session(self.start.session_id)
            except RollwireError as error:
                _log.warning("a session lease was not renewed", target=self.server.client.target, error=str(error))


class SessionOpener:
    """Opens sessions on the least busy server and closes them in the background.

    Args:
        pool: The servers.
        step_timeout_s: Longest time for opening or a step, the network included.
    """

    def __init__(self, pool: EnvironmentPool, step_timeout_s: float) -> None:
        self._pool = pool
        self._step_timeout_s = step_timeout_s
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, targets: Sequence[str], tag: str, seed: int, options: Struct) -> Session:
        """Opens a session on one of the servers; full servers are asked again, a limited number of times.

        Raises:
            EpisodeFailed: No server could open it.
        """
        failure: RollwireError | None = None
        for _ in range(_OPEN_ATTEMPTS):
            for server in self._pool.by_load(targets):
                server.sessions += 1
                try:
                    return await self._open_on(server, tag, seed, options)
                except RollwireError as error:
                    server.sessions -= 1
                    failure = error
                    if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                        raise _failed(error, server.client.target) from error
                except BaseException:
                    server.sessions -= 1
                    raise
            assert failure is not None
            if failure.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
                break
            wait_s = failure.retry_after_s or _SHORTEST_WAIT_S
            await asyncio.sleep(min(max(wait_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S))
        assert failure is not None
        raise _failed(failure, ", ".join(targets)) from failure

    def close(self, session: Session) -> None:
        """Closes a session in the background; it keeps counting as load until then."""
        self._in_background(self._close(session))

    async def finish(self) -> None:
        """Waits until every session is closed; those that cannot be are left to their leases."""
        if self._closing:
            _, late = await asyncio.wait(self._closing, timeout=_FINISH_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _open_on(self, server: EnvironmentServer, tag: str, seed: int, options: Struct) -> Session:
        description = await server.describe(tag)
        # The key is new for every session: a repeated group must not find the session of a call that was cut.
        request = environment_pb2.OpenSessionRequest(
            request_id=new_id("session"),
            environment_tag=tag,
            seed=seed,
            options=options,
            lease=Duration(seconds=LEASE_S),
        )
        opening = asyncio.create_task(server.calls.open_session(request, timeout_s=self._step_timeout_s))
        try:
            start = await asyncio.shield(opening)
        except asyncio.CancelledError:
            server.sessions += 1
            self._in_background(self._close_once_open(server, opening))
            raise
        _check_failure(start)
        return Session(server, description, start, self._step_timeout_s)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_once_open(
        self, server: EnvironmentServer, opening: asyncio.Task[environment_pb2.OpenSessionResponse]
    ) -> None:
        """Closes the session of an episode that was cancelled before it was open; else it would live for its lease."""
        try:
            start = await opening
            if not start.HasField("failure"):
                await server.calls.close_session(start.session_id, timeout_s=_CLOSE_TIMEOUT_S)
        except RollwireError as error:
            _log.info("a session may be left to its lease", target=server.client.target, error=str(error))
        finally:
            server.sessions -= 1

    async def _close(self, session: Session) -> None:
        try:
            await session.server.calls.close_session(session.start.session_id, timeout_s=_CLOSE_TIMEOUT_S)
        except RollwireError as error:
            _log.info("a session was left to its lease", target=session.server.client.target, error=str(error))
        finally:
            session.server.sessions -= 1


def _check_failure(answer: environment_pb2.OpenSessionResponse | environment_pb2.StepResponse) -> None:
    """Raises `EpisodeFailed` when an answer reports that the environment failed."""
    if answer.HasField("failure"):
        failure = answer.failure
        reason = _KINDS.get(failure.kind, trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR)
        raise EpisodeFailed(reason, f"{failure.type}: {failure.message}" if failure.type else failure.message)


def _check_step(answer: environment_pb2.StepResponse) -> None:
    """Raises `EpisodeFailed` when an answer is outside the contract: no such reward may reach the learner."""
    problem = None
    if not math.isfinite(answer.reward):
        problem = f"reward is {answer.reward}"
    elif len(answer.metrics) > _MAX_METRICS:
        problem = f"{len(answer.metrics)} metrics; allowed: {_MAX_METRICS}"
    else:
        for name, value in answer.metrics.items():
            if not math.isfinite(value) or METRIC_PATTERN.fullmatch(name) is None:
                problem = f"metric {name[:128]!r} is {value}"
    if problem is not None:
        raise EpisodeFailed(
            trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR,
            f"the environment server answered outside the contract: {problem}",
        )


def _failed(error: RollwireError, target: str) -> EpisodeFailed:
    """Returns the failure for a call that ended with an error."""
    reason = trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR
    if error.code == grpc.StatusCode.DEADLINE_EXCEEDED:
        reason = trajectory_pb2.FAILURE_REASON_ENVIRONMENT_TIMEOUT
    elif error.code == grpc.StatusCode.UNAVAILABLE or error.reason in (Reason.UNKNOWN_SESSION, Reason.TRANSPORT):
        reason = trajectory_pb2.FAILURE_REASON_ENVIRONMENT_LOST
    return EpisodeFailed(reason, f"environment server {target}: {error}")
