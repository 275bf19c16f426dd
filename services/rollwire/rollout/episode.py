"""One episode: environment and policy in turns, until the environment ends it, a limit cuts it, or something fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from google.protobuf.duration_pb2 import Duration

from rollwire.rollout.chat import ChatEncoder, Message
from rollwire.rollout.engine import GenerationError, GenerationRequest, Piece
from rollwire.rollout.policy import Policy
from rollwire.rollout.prompts import PromptTemplates
from rollwire.rollout.record import EpisodeRecord
from rollwire.rollout.requests import GroupPlan, write_sampling
from rollwire.rollout.seeds import derive_seed
from rollwire.rollout.sessions import EpisodeFailed, Session, SessionOpener
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.ids import new_id
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2, rollout_pb2, trajectory_pb2

_log = get_logger(__name__)
GENERATION_TIMEOUT_S: Final = 300.0
"""Longest time for the response of one turn, queueing included."""
DRAWS_PER_TURN: Final = 8
"""A turn is drawn again when an update or a pause cut it; more often than this it is given up."""


@dataclass(frozen=True)
class Hashes:
    """What identifies the text side of a trajectory: SHA-256 in hex of the tokenizer and of all templates."""

    tokenizer: str
    templates: str


@dataclass
class _Clock:
    """Where the time of an episode went, in seconds."""

    started_s: float
    environment_s: float = 0.0
    generation_s: float = 0.0


class EpisodeRunner:
    """Plays episodes.

    Args:
        policy: Who answers.
        opener: Opens environment sessions.
        encoder: Turns messages into tokens.
        prompts: Turns observations into messages.
        hashes: Copied into every trajectory.
    """

    def __init__(
        self, policy: Policy, opener: SessionOpener, encoder: ChatEncoder, prompts: PromptTemplates, hashes: Hashes
    ) -> None:
        self._policy = policy
        self._opener = opener
        self._encoder = encoder
        self._prompts = prompts
        self._hashes = hashes

    async def play(self, plan: GroupPlan, index: int, timeout_s: float) -> rollout_pb2.RunGroupResponse:
        """Plays one episode of a group and returns its trajectory or its failure; raises only when cancelled.

        Args:
            plan: The group.
            index: Which episode.
            timeout_s: Wall-clock limit.
        """
        record, clock = EpisodeRecord(), _Clock(time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                trajectory = await self._play(plan, index, record, clock)
            return _fitting(rollout_pb2.RunGroupResponse(trajectory=trajectory))
        except EpisodeFailed as error:
            failure = error
        except TimeoutError:
            failure = EpisodeFailed(
                trajectory_pb2.FAILURE_REASON_DEADLINE_EXCEEDED, f"the episode did not end within {timeout_s:.1f} s"
            )
        except Exception as error:  # a bug here must not lose the other episodes of the group, nor become a reward
            incident = new_id("incident")
            _log.error("unexpected error in an episode", group=plan.group_id, incident=incident, exc_info=error)
            failure = EpisodeFailed(
                trajectory_pb2.FAILURE_REASON_GENERATION_ERROR,
                f"unexpected {type(error).__name__}; the log of the rollout server has the details under {incident}",
            )
        return rollout_pb2.RunGroupResponse(
            failure=trajectory_pb2.EpisodeFailure(
                group_id=plan.group_id,
                episode_index=index,
                attempt=plan.attempt,
                environment_tag=plan.environment_tag,
                environment_seed=plan.environment_seed,
                reason=failure.reason,
                message=failure.message,
                turn=record.turn_index,
            )
        )

    async def _play(
        self, plan: GroupPlan, index: int, record: EpisodeRecord, clock: _Clock
    ) -> trajectory_pb2.Trajectory:
        began_s = time.monotonic()
        session = await self._opener.open(
            plan.targets, plan.environment_tag, plan.environment_seed, plan.environment_options
        )
        clock.environment_s += time.monotonic() - began_s
        cache_key = new_id("episode")
        keep_alive = asyncio.create_task(session.keep_alive())
        try:
            seed = derive_seed(plan.sampling_seed, index)
            end = await self._turns(plan, seed, session, cache_key, record, clock)
        finally:
            keep_alive.cancel()
            self._policy.engine.release(cache_key)
            self._opener.close(session)
        return self._trajectory(plan, index, session, record, clock, end)

    async def _turns(
        self, plan: GroupPlan, seed: int, session: Session, cache_key: str, record: EpisodeRecord, clock: _Clock
    ) -> trajectory_pb2.EpisodeEnd.ValueType:
        """Plays turn after turn; returns why the episode ended."""
        max_turns, max_tokens = session.start.max_turns, plan.sampling.max_tokens
        start = session.start
        messages = self._first_messages(start, max_turns, max_tokens)
        block, new_sequence, observation = self._encoder.opening(messages), True, start.observation
        if len(block) >= plan.max_episode_tokens:
            raise EpisodeFailed(
                trajectory_pb2.FAILURE_REASON_PROMPT_TOO_LONG,
                f"the first prompt has {len(block)} tokens, an episode at most {plan.max_episode_tokens}; raise "
                "rollout.max_episode_tokens",
            )
        while True:
            turn = record.turn_index
            record.add_prompt(block, new_sequence=new_sequence, observation=observation)
            began_s = time.monotonic()
            pieces = await self._respond(plan, record.token_ids(), derive_seed(seed, turn), cache_key)
            answered_s = time.monotonic()
            clock.generation_s += answered_s - began_s
            record.add_response(pieces)
            answer = [token for piece in pieces for token in piece.token_ids]
            stopped = pieces[-1].stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN
            text = self._encoder.text(answer, stopped=stopped)
            step = await session.step(turn, text)
            clock.environment_s += time.monotonic() - answered_s
            if turn + 1 >= max_turns and not step.terminated:
                step.truncated = True
            record.add_outcome(step)
            if step.terminated:
                return trajectory_pb2.EPISODE_END_TERMINATED
            if step.truncated:
                return trajectory_pb2.EPISODE_END_TRUNCATED
            following, observation = self._next_messages(step, turn + 1, max_turns, max_tokens), step.observation
            if self._encoder.extends:
                new_sequence = False
                block = self._encoder.continuation(following[0], answer, stopped=stopped)
                length = len(record.sequences[-1].token_ids) + len(block)
            else:
                messages += [{"role": "assistant", "content": text}, *following]
                block = self._encoder.opening(messages)
                length = len(block)
            if length >= plan.max_episode_tokens:
                return trajectory_pb2.EPISODE_END_TOKEN_LIMIT

    async def _respond(self, plan: GroupPlan, token_ids: Sequence[int], seed: int, cache_key: str) -> list[Piece]:
        """Draws the response of a turn; draws it again when an update or a pause cut it."""
        request = GenerationRequest(token_ids, plan.sampling, seed, plan.max_episode_tokens, cache_key)
        try:
            async with asyncio.timeout(GENERATION_TIMEOUT_S):
                for _ in range(DRAWS_PER_TURN):
                    async with aclosing(self._policy.generate(request)) as stream:
                        pieces = [piece async for piece in stream]
                    if pieces[-1].stop_reason != trajectory_pb2.STOP_REASON_ABORTED:
                        return pieces
        except TimeoutError as error:
            raise EpisodeFailed(
                trajectory_pb2.FAILURE_REASON_GENERATION_TIMEOUT,
                f"the policy did not answer within {GENERATION_TIMEOUT_S:.0f} s",
            ) from error
        except (GenerationError, RollwireError) as error:
            raise EpisodeFailed(trajectory_pb2.FAILURE_REASON_GENERATION_ERROR, str(error)) from error
        raise EpisodeFailed(
            trajectory_pb2.FAILURE_REASON_GENERATION_ERROR, f"updates or pauses cut this turn {DRAWS_PER_TURN} times"
        )

    def _first_messages(
        self, start: environment_pb2.OpenSessionResponse, max_turns: int, max_tokens: int
    ) -> list[Message]:
        messages = self._prompts.first_messages(
            start.instructions, start.observation, 0, max_turns, max_tokens, start.suffix
        )
        return self._with_suffix(messages, start.suffix)

    def _next_messages(
        self, step: environment_pb2.StepResponse, turn: int, max_turns: int, max_tokens: int
    ) -> list[Message]:
        messages = self._prompts.next_messages(step.observation, turn, max_turns - turn, max_tokens, step.suffix)
        return self._with_suffix(messages, step.suffix)

    def _with_suffix(self, messages: list[Message], suffix: str) -> list[Message]:
        """Appends the environment's suffix where the template has no place for it."""
        if suffix and "{suffix}" not in self._prompts.turn:
            messages[-1]["content"] += suffix
        return messages

    def _trajectory(
        self,
        plan: GroupPlan,
        index: int,
        session: Session,
        record: EpisodeRecord,
        clock: _Clock,
        end: trajectory_pb2.EpisodeEnd.ValueType,
    ) -> trajectory_pb2.Trajectory:
        return trajectory_pb2.Trajectory(
            trajectory_id=f"{plan.group_id}-e{index}-a{plan.attempt}",
            group_id=plan.group_id,
            episode_index=index,
            attempt=plan.attempt,
            environment_tag=plan.environment_tag,
            environment_seed=plan.environment_seed,
            sampling_seed=derive_seed(plan.sampling_seed, index),
            sequences=record.sequences,
            turns=record.turns,
            score=record.score,
            metrics=record.metrics(session.description.metric_aggregation),
            end=end,
            sampling=write_sampling(plan.sampling),
            tokenizer_hash=self._hashes.tokenizer,
            template_hash=self._hashes.templates,
            duration=_duration(time.monotonic() - clock.started_s),
            environment_duration=_duration(clock.environment_s),
            generation_duration=_duration(clock.generation_s),
        )


def _fitting(response: rollout_pb2.RunGroupResponse) -> rollout_pb2.RunGroupResponse:
    """Returns a response that fits into a message; one that does not would end the stream for the whole group."""
    size = response.ByteSize()
    if size > INTERNAL_MESSAGE_BYTES:
        raise EpisodeFailed(
            trajectory_pb2.FAILURE_REASON_GENERATION_ERROR,
            f"the trajectory has {size} bytes, a message at most {INTERNAL_MESSAGE_BYTES}; lower "
            "rollout.max_episode_tokens",
        )
    return response


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(int(seconds * 1e9))
    return found
