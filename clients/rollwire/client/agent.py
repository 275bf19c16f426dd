"""`AgentSession` and `agent_session`: an agent that keeps its own loop plays one episode of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from rollwire.client.background import run_in_background
from rollwire.client.coordinator import CoordinatorClient
from rollwire.client.options import integral
from rollwire.client.patience import Patience, RunEndedError
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.ids import new_id
from rollwire.v1 import coordinator_pb2

WAIT_S: Final = 3600.0
LOST_S: Final = 60.0
_ABANDON_S: Final = 10.0
_MAX_FAILURE_BYTES: Final = 4096
_LEFT: Final = "the agent left its session without a result"


class AgentSession:
    """One episode; made by `open_agent_session`.

    Attributes:
        base_url: Base URL for OpenAI's clients.
        api_key: Key for them, valid until the session is finished.
        model: Name of the model for calls.
        seed: Seed of the task: equal for all sessions of a group.
        options: The entry's `options` in the run's configuration; 4.0 has become 4.
        task_name: The name that was asked for, or the one that the coordinator chose.
        group_id: Group of the session.
        episode_index: Position in the group, from 0.
        max_tokens: Most tokens that one call may draw.
        max_sequence_tokens: Most tokens of one call, prompt and response together.
        session_id: Identifier.
        finished: True once it has a result or has failed.
    """

    def __init__(
        self, client: CoordinatorClient, answer: coordinator_pb2.OpenAgentSessionResponse, patience: Patience
    ) -> None:
        self.session_id = answer.session_id
        self.base_url = answer.base_url
        self.api_key = answer.api_key
        self.model = answer.model
        self.seed = answer.seed
        self.options = {name: integral(value) for name, value in json_format.MessageToDict(answer.options).items()}
        self.task_name = answer.task_name
        self.group_id = answer.group_id
        self.episode_index = answer.episode_index
        self.max_tokens = answer.max_tokens
        self.max_sequence_tokens = answer.max_sequence_tokens
        self.finished = False
        self._client = client
        self._patience = patience

    async def finish(
        self,
        reward: float,
        *,
        call_rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        truncated: bool = False,
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        """Ends the session with its result; returns once that is durable.

        Args:
            reward: Reward of the whole session, added to that of its last call.
            call_rewards: Rewards of single calls, by the `id` of OpenAI's response.
            metrics: Metrics of the episode; `success` is shown as success rate.
            truncated: True if the episode was cut, false if it reached its end.

        Raises:
            RollwireError: `UNKNOWN_SESSION` when its lease has ended, `NO_CALLS` when the policy was never called,
                `INVALID_FIELD` for what cannot be used.
            RunEndedError: The run has ended.
            ValueError: The session has ended.
        """
        result = coordinator_pb2.AgentResult(
            reward=reward, call_rewards=call_rewards or {}, metrics=metrics or {}, truncated=truncated
        )
        return await self._close(coordinator_pb2.CloseAgentSessionRequest(completed=result))

    async def fail(self, cause: str) -> None:
        """Ends the session without a result; the run asks for the episode again.

        Raises:
            RollwireError: `UNKNOWN_SESSION` when its lease has ended.
            RunEndedError: The run has ended.
        """
        short = cause.encode(errors="replace")[:_MAX_FAILURE_BYTES].decode(errors="ignore")
        await self._close(coordinator_pb2.CloseAgentSessionRequest(failure=short))

    async def _close(
        self, request: coordinator_pb2.CloseAgentSessionRequest
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        if self.finished:
            raise ValueError(f"session {self.session_id} has ended; finish it once, inside its block")
        request.session_id = self.session_id
        answer = await self._patience.call(lambda: self._client.close_agent_session(request))
        self.finished = True
        return answer


@asynccontextmanager
async def open_agent_session(
    target: str | CoordinatorClient,
    environment_tag: str,
    *,
    task_name: str = "",
    lease_s: float = 600.0,
    wait_s: float = WAIT_S,
    lost_s: float = LOST_S,
) -> AsyncIterator[AgentSession]:
    """Opens a session and, if the block did not finish it, closes it as failed.

    Args:
        target: `host:port` of the coordinator, or a client of it.
        environment_tag: Tag of an entry of the run with `source: agent`.
        task_name: Name of a task that the agent chose itself; sessions of one name form groups. Empty to be given one.
        lease_s: The session ends when no call came for so long, or for the run's `timeouts.group_s` if that is less;
            1 to 3600.
        wait_s: Longest time to wait for an episode to play.
        lost_s: Longest time in which the coordinator cannot be reached.

    Raises:
        RunEndedError: The run has ended.
        RollwireError: It refuses, or `wait_s` or `lost_s` is over.
    """
    lease = Duration()
    lease.FromNanoseconds(int(lease_s * 1e9))
    request = coordinator_pb2.OpenAgentSessionRequest(
        request_id=new_id("request"), environment_tag=environment_tag, task_name=task_name, lease=lease
    )
    async with AsyncExitStack() as stack:
        if isinstance(target, CoordinatorClient):
            client = target
        else:
            client = await stack.enter_async_context(CoordinatorClient(target))
        answer = await Patience(wait_s, lost_s).call(lambda: client.open_agent_session(request))
        session = AgentSession(client, answer, Patience(lost_s, lost_s))
        try:
            yield session
        except BaseException as error:
            await _abandon(session, f"{type(error).__name__}: {error}")
            raise
        await _abandon(session, _LEFT)


async def _abandon(session: AgentSession, cause: str) -> None:
    """Closes a session that has no result, without hiding what ended it."""
    if session.finished:
        return
    with suppress(RollwireError, RunEndedError, TimeoutError):  # its lease ends it otherwise
        async with asyncio.timeout(_ABANDON_S):
            await session.fail(cause)
    session.finished = True


class BlockingAgentSession:
    """An `AgentSession` for programs that are not asynchronous: the same attributes, methods that wait."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def finish(
        self,
        reward: float,
        *,
        call_rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        truncated: bool = False,
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        """Ends the session with its result, see `AgentSession.finish`."""
        return run_in_background(
            self._session.finish(reward, call_rewards=call_rewards, metrics=metrics, truncated=truncated)
        )

    def fail(self, cause: str) -> None:
        """Ends the session without a result, see `AgentSession.fail`."""
        run_in_background(self._session.fail(cause))


@contextmanager
def agent_session(
    target: str,
    environment_tag: str,
    *,
    task_name: str = "",
    lease_s: float = 600.0,
    wait_s: float = WAIT_S,
    lost_s: float = LOST_S,
) -> Iterator[BlockingAgentSession]:
    """Opens a session for a program that is not asynchronous; arguments and errors as of `open_agent_session`.

    Any number of threads may have sessions at once.
    """
    stack = AsyncExitStack()
    opening = open_agent_session(
        target, environment_tag, task_name=task_name, lease_s=lease_s, wait_s=wait_s, lost_s=lost_s
    )
    session = run_in_background(stack.enter_async_context(opening))
    try:
        yield BlockingAgentSession(session)
    except BaseException as error:
        run_in_background(stack.__aexit__(type(error), error, error.__traceback__))
        raise
    run_in_background(stack.aclose())
