"""The calls of a session and how their tokens extend each other. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from rollwire.rollout.agents.prefixes import PrefixIndex
from rollwire.rollout.engine import Piece


class CallState(Enum):
    """Where a call stands."""

    RUNNING = auto()
    COMPLETED = auto()
    FAILED = auto()
    """It gave no complete answer and is not part of the record."""


@dataclass(eq=False)
class Call:
    """One call of the policy.

    Attributes:
        number: Position in the session, from 0, in the order of arrival.
        call_id: The `id` of its answer.
        parent: The call whose tokens the prompt begins with, exactly; None if there is none.
        block: Tokens of the prompt that follow the parent's.
        observation: SHA-256 of what the agent showed since the answer before; empty where unknown.
        cache_key: Names the prefix that the engine may keep; empty for none.
        pieces: What was drawn, once the call completed.
        length: Tokens of prompt and answer together; of the prompt alone until the call completed.
        state: Where it stands.
        most_bytes: The most that it takes in the record.
    """

    number: int
    call_id: str
    parent: Call | None
    block: list[int]
    observation: bytes = b""
    cache_key: str = ""
    pieces: Sequence[Piece] = ()
    length: int = 0
    state: CallState = CallState.RUNNING
    most_bytes: int = 0

    def __post_init__(self) -> None:
        self.length = (0 if self.parent is None else self.parent.length) + len(self.block)

    @property
    def response_ids(self) -> list[int]:
        """What the policy answered."""
        return [token for piece in self.pieces for token in piece.token_ids]

    def prompt_ids(self) -> list[int]:
        """Returns the whole prompt."""
        parts, ancestor = [self.block], self.parent
        while ancestor is not None:
            parts += [ancestor.response_ids, ancestor.block]
            ancestor = ancestor.parent
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True)
class Prompt:
    """A prompt, linked to the call that it extends.

    Attributes:
        parent: As in `Call`.
        block: As in `Call`.
        observation: As in `Call`.
        transcript: The conversation up to here, one line per message; None for a prompt without messages.
        text: The prompt as text in UTF-8; None unless it came as one text.
    """

    parent: Call | None
    block: list[int]
    observation: bytes = b""
    transcript: bytes | None = None
    text: bytes | None = None

    @property
    def length(self) -> int:
        """Tokens of the whole prompt."""
        return (0 if self.parent is None else self.parent.length) + len(self.block)


@dataclass
class CallBook:
    """All calls of a session, and where their tokens, conversations and texts end.

    Attributes:
        calls: In the order of arrival.
        by_tokens: Completed calls by prompt and answer as token ids.
        by_transcript: Completed calls by conversation, the answer included.
        by_text: Completed calls by the text of prompt and answer.
    """

    calls: list[Call] = field(default_factory=list)
    by_tokens: PrefixIndex[Call] = field(default_factory=PrefixIndex)
    by_transcript: PrefixIndex[Call] = field(default_factory=PrefixIndex)
    by_text: PrefixIndex[Call] = field(default_factory=PrefixIndex)

    @property
    def running(self) -> int:
        """Calls that have no answer yet."""
        return sum(call.state is CallState.RUNNING for call in self.calls)

    @property
    def completed(self) -> list[Call]:
        """Calls with an answer."""
        return [call for call in self.calls if call.state is CallState.COMPLETED]

    def is_extended(self, call: Call) -> bool:
        """Tells whether another call continues the sequence of this one, or may."""
        return any(other.parent is call for other in self.calls)

    def extending(self, token_ids: Sequence[int]) -> tuple[Call | None, list[int]]:
        """Returns the call with the longest tokens that a prompt begins with, if there is one, and what is new."""
        found = self.by_tokens.longest(token_bytes(token_ids))
        if found is None:
            return None, list(token_ids)
        call, _ = found
        return call, list(token_ids[call.length :])

    def complete(self, call: Call, prompt: Prompt, pieces: Sequence[Piece], line: bytes, raw: bytes) -> None:
        """Records an answer.

        Args:
            call: The call.
            prompt: What it began with.
            pieces: What was drawn.
            line: The answer as a line of the conversation.
            raw: The answer as text in UTF-8, with everything that was drawn.
        """
        call.pieces = list(pieces)
        call.length += sum(len(piece.token_ids) for piece in pieces)
        call.state = CallState.COMPLETED
        self.by_tokens.add(token_bytes([*call.prompt_ids(), *call.response_ids]), call)
        if prompt.transcript is not None:
            self.by_transcript.add(prompt.transcript + line, call)
        if prompt.text is not None:
            self.by_text.add(prompt.text + raw, call)

    def fail(self, call: Call) -> None:
        """Forgets a call that gave no complete answer."""
        call.state = CallState.FAILED
        self.calls.remove(call)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as bytes, four each, so that prefixes of one are prefixes of the other."""
    return np.asarray(token_ids, dtype="<i4").tobytes()
