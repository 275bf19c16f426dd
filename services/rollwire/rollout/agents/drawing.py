"""Draws the answer of a call from the policy: through updates and pauses, within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeAlias

from rollwire.rollout.agents.answer import Answer, Delta
from rollwire.rollout.agents.calls import Call
from rollwire.rollout.agents.errors import CallError, engine_failed, from_policy
from rollwire.rollout.agents.parameters import Options
from rollwire.rollout.agents.session import PolicySession
from rollwire.rollout.chat import ChatEncoder
from rollwire.rollout.continuation import continuation, reason_to_stop
from rollwire.rollout.engine import GenerationError, GenerationRequest
from rollwire.rollout.episode import DRAWS_PER_TURN, GENERATION_TIMEOUT_S
from rollwire.rollout.policy import Policy
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import trajectory_pb2

Emit: TypeAlias = Callable[[Delta], Awaitable[bool]]
"""Sends a piece of an answer; returns whether the agent was sent anything."""

_ABORTED: Final = trajectory_pb2.STOP_REASON_ABORTED


class Drawer:
    """Draws answers.

    Args:
        policy: Who answers.
        encoder: Turns tokens into text.
    """

    def __init__(self, policy: Policy, encoder: ChatEncoder) -> None:
        self._policy = policy
        self._encoder = encoder

    async def draw(
        self, session: PolicySession, call: Call, options: Options, *, parse_tools: bool, emit: Emit | None
    ) -> Answer:
        """Draws a whole answer; cancelling aborts the generation.

        Args:
            session: The session.
            call: The call.
            options: How it is answered.
            parse_tools: Look for function calls.
            emit: Gets the answer piece by piece; None if nobody wants the pieces.

        Raises:
            CallError: There is no answer.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        limit_s = min(GENERATION_TIMEOUT_S, session.end_s - began_s)
        try:
            async with asyncio.timeout(limit_s):
                return await self._drawn(session, call, options, parse_tools, emit)
        except TimeoutError as error:
            message = f"the policy did not answer within {limit_s:.0f} s; ask again"
            raise CallError(504, "generation_timeout", message, retry_after_s=1.0) from error
        except GenerationError as error:
            raise engine_failed(str(error)) from error
        except RollwireError as error:
            raise from_policy(error) from error
        finally:
            session.generation_s += loop.time() - began_s

    async def _drawn(
        self, session: PolicySession, call: Call, options: Options, parse_tools: bool, emit: Emit | None
    ) -> Answer:
        """Draws again what an update or a pause cut; what the agent has seen already goes on where it was cut."""
        whole = session.request(call, options.sampling, options.seed, stream=emit is not None or bool(options.stops))
        sent = False

        async def emitted(delta: Delta) -> bool:
            return emit is not None and await emit(delta)

        def new() -> Answer:
            tools_of = call.number if parse_tools else None
            return Answer(self._encoder.decoded, options.sampling.stop_token_ids, options.stops, tools_of)

        answer, asked = new(), whole
        for _ in range(DRAWS_PER_TURN):
            sent = await self._once(asked, answer, emitted, sent)
            if answer.stop_reason == _ABORTED and sent:
                answer.settle(reason_to_stop(whole, answer.response_ids))
            if answer.ended and answer.stop_reason != _ABORTED:
                await emitted(answer.finish())
                return answer
            if sent:
                asked = continuation(whole, answer.response_ids)
            else:
                answer, asked = new(), whole
        raise engine_failed(f"updates or pauses cut the answer {DRAWS_PER_TURN} times")

    async def _once(self, asked: GenerationRequest, answer: Answer, emitted: Emit, sent: bool) -> bool:
        """Draws until the answer ends or is aborted; returns whether the agent was sent anything so far."""
        async with aclosing(self._policy.generate(asked)) as pieces:
            async for piece in pieces:
                delta = answer.push(piece)
                if sent or answer.stop_reason != _ABORTED:
                    sent = await emitted(delta) or sent
                if answer.ended:
                    break
        return sent
