"""One policy session: what it may still do, and its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from rollwire.rollout.agents.calls import Call, CallBook, CallState, Prompt
from rollwire.rollout.agents.errors import CallError, session_closed, too_long, too_many
from rollwire.rollout.agents.plans import SessionPlan
from rollwire.rollout.engine import GenerationRequest, Piece, Sampling
from rollwire.rollout.seeds import derive_seed
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES

MAX_RUNNING_CALLS: Final = 64
"""Calls of one session at once."""

# A token takes at most five bytes as an id, one in the mask and four as a log-probability.
_TOKEN_BYTES: Final = 10
_TURN_BYTES: Final = 256
# Room for metrics and for what describes the trajectory.
_FRAME_BYTES: Final = 64 << 10


class PolicySession:
    """A session that is open or has just ended.

    Args:
        plan: What was asked for.
        now_s: Present time.
        limit_s: Calls are answered for so long.
        keep_prefixes: Let the engine keep the prefixes of conversations.

    Attributes:
        plan: As given.
        opened_s: When it was opened.
        end_s: When the last call may end.
        touched_s: When the last call began or ended.
        generation_s: Time that calls spent waiting for the policy.
        book: Its calls.
        ended: Set once it is closed or expired.
    """

    def __init__(self, plan: SessionPlan, now_s: float, limit_s: float, *, keep_prefixes: bool) -> None:
        self.plan = plan
        self.opened_s = now_s
        self.end_s = now_s + limit_s
        self.touched_s = now_s
        self.generation_s = 0.0
        self.book = CallBook()
        self.ended = asyncio.Event()
        self._limit_s = limit_s
        self._keep_prefixes = keep_prefixes
        self._numbers = 0

    def begin(self, prompt: Prompt, prefix: str, max_tokens: int, now_s: float) -> Call:
        """Admits a call.

        Args:
            prompt: What it begins with.
            prefix: Beginning of its identifier.
            max_tokens: Most tokens of its answer.
            now_s: Present time.

        Raises:
            CallError: It is not allowed now.
        """
        if self.ended.is_set():
            raise session_closed()
        if now_s >= self.end_s:
            message = f"the session is older than rollout.episode_timeout_s={self._limit_s:g} s; close it"
            raise CallError(409, "session_timeout", message)
        if prompt.length >= self.plan.max_sequence_tokens:
            raise too_long(prompt.length, self.plan.max_sequence_tokens)
        if len(self.book.calls) >= self.plan.max_calls:
            message = f"the session has made its {self.plan.max_calls} calls; close it"
            raise CallError(409, "calls_exhausted", message)
        if self.book.running >= MAX_RUNNING_CALLS:
            raise too_many(MAX_RUNNING_CALLS, "of this session")
        recorded, most = self._recorded_bytes(), self._most_bytes(prompt, max_tokens)
        if recorded + most > INTERNAL_MESSAGE_BYTES:
            message = f"the record of the session has {recorded} bytes, and a message holds no further call; close it"
            raise CallError(409, "record_full", message)
        number = self._numbers
        self._numbers += 1
        call = Call(
            number, f"{prefix}-{self.plan.session_id}-{number}", prompt.parent, prompt.block, prompt.observation
        )
        call.cache_key = self._cache_key(call)
        call.most_bytes = most
        self.book.calls.append(call)
        self.touched_s = now_s
        return call

    def request(self, call: Call, sampling: Sampling, seed: int | None, *, stream: bool) -> GenerationRequest:
        """Returns what the engine is asked for a call; a seed of the agent's chooses among the draws of this call."""
        drawn_with = derive_seed(self.plan.sampling_seed, call.number)
        return GenerationRequest(
            call.prompt_ids(),
            sampling,
            drawn_with if seed is None else derive_seed(drawn_with, seed),
            self.plan.max_sequence_tokens,
            call.cache_key,
            stream,
        )

    def complete(
        self, call: Call, prompt: Prompt, pieces: Sequence[Piece], line: bytes, raw: bytes, now_s: float
    ) -> None:
        """Records an answer, see `CallBook.complete`. Raises `CallError` when the session has ended meanwhile."""
        if self.ended.is_set():
            raise session_closed()
        self.book.complete(call, prompt, pieces, line, raw)
        self.touched_s = now_s

    def abandon(self, call: Call, now_s: float) -> None:
        """Forgets a call that has no complete answer; does nothing if it has one."""
        if call.state is CallState.RUNNING:
            self.book.fail(call)
            self.touched_s = now_s

    def cache_keys(self) -> set[str]:
        """Returns the keys under which the engine may keep prefixes."""
        return {call.cache_key for call in self.book.calls if call.cache_key}

    def _cache_key(self, call: Call) -> str:
        """Returns the key of the parent, if no other call uses it, else one of its own."""
        if not self._keep_prefixes:
            return ""
        if call.parent is not None and not self.book.is_extended(call.parent):
            return call.parent.cache_key
        return f"agent-{self.plan.session_id}-{call.number}"

    def _recorded_bytes(self) -> int:
        return _FRAME_BYTES + sum(call.most_bytes for call in self.book.calls)

    def _most_bytes(self, prompt: Prompt, max_tokens: int) -> int:
        """Returns the most that a call adds to the record; a branch repeats what it begins with."""
        continues = prompt.parent is not None and not self.book.is_extended(prompt.parent)
        added = len(prompt.block) if continues else prompt.length
        room = self.plan.max_sequence_tokens - prompt.length
        return _TURN_BYTES + _TOKEN_BYTES * (added + min(max_tokens, room))
