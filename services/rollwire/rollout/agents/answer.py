"""The answer to one call as its tokens arrive: what is recorded, what the agent sees, and when it ends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollwire.rollout.agents.text import Scanner, TokenText
from rollwire.rollout.agents.tool_calls import BEGIN, ToolCall, parse_tool_calls
from rollwire.rollout.engine import Piece
from rollwire.v1 import trajectory_pb2

_GOES_ON = trajectory_pb2.STOP_REASON_UNSPECIFIED


@dataclass(frozen=True)
class Delta:
    """What one piece added.

    Attributes:
        text: Text that the agent may see now.
        token_ids: Tokens that were recorded.
        logprobs: Log-probability of each.
    """

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()


class Answer:
    """An answer.

    Args:
        decode: Text of token ids, special ones included.
        hidden: Tokens that end a generation; the agent does not see them.
        stops: Texts that end the answer; the agent does not see them.
        tools_of: Number of the call, from which identifiers of function calls derive; None if none are looked for.

    Attributes:
        pieces: What was recorded; a text that ended the answer is part of it, as far as its last token.
        content: What the agent sees as text.
        tool_calls: Function calls.
        raw: The text of everything that was recorded.
        stop_reason: Why it ended; unspecified until then.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int], stops: Sequence[str], tools_of: int | None
    ) -> None:
        self.pieces: list[Piece] = []
        self.content = ""
        self.tool_calls: list[ToolCall] = []
        self.raw = ""
        self.stop_reason: trajectory_pb2.StopReason.ValueType = _GOES_ON
        self._decode = decode
        self._hidden = hidden
        self._tools_of = tools_of
        self._tokens = TokenText(decode)
        self._stops = Scanner(stops)
        self._tools = Scanner([] if tools_of is None else [BEGIN])
        self._tool_text = ""

    @property
    def ended(self) -> bool:
        """True once nothing more belongs to the answer."""
        return self.stop_reason != _GOES_ON

    @property
    def response_ids(self) -> list[int]:
        """All recorded tokens."""
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, in the words of OpenAI's protocol."""
        if self.tool_calls:
            return "tool_calls"
        return "stop" if self.stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN else "length"

    def push(self, piece: Piece) -> Delta:
        """Adds what was drawn; a stop text ends the answer with the token that completes it."""
        shown = ""
        for position, token in enumerate(piece.token_ids):
            shown += self._push_token(token)
            if self._stops.found is not None:
                end = position + 1
                piece = replace(
                    piece,
                    token_ids=piece.token_ids[:end],
                    logprobs=piece.logprobs[:end],
                    stop_reason=trajectory_pb2.STOP_REASON_STOP_TOKEN,
                )
                break
        self.pieces.append(piece)
        self.stop_reason = piece.stop_reason
        return Delta(shown, piece.token_ids, piece.logprobs)

    def settle(self, reason: trajectory_pb2.StopReason.ValueType) -> None:
        """Replaces the reason of what was drawn last; unspecified lets the answer go on."""
        self.stop_reason = reason
        self.pieces[-1] = replace(self.pieces[-1], stop_reason=reason)

    def finish(self) -> Delta:
        """Completes text and function calls once the answer has ended; returns what was held back."""
        shown = ""
        if self._stops.found is None:
            rest = self._tokens.finish()
            self.raw += rest
            shown = self._after_tokens(rest)
        if self._stops.found is None:
            shown += self._after_stops(self._stops.finish())
        if self._tools_of is not None and self._tools.found is not None:
            self.tool_calls = parse_tool_calls(self._tool_text, self._tools_of)
            held = "" if self.tool_calls else self._tool_text
        else:
            held = self._tools.finish()
        self.content += held
        return Delta(shown + held)

    def _push_token(self, token: int) -> str:
        if token in self._hidden:
            rest = self._tokens.finish()
            self.raw += rest + self._decode([token])
            return self._after_tokens(rest)
        text = self._tokens.push(token)
        self.raw += text
        return self._after_tokens(text)

    def _after_tokens(self, text: str) -> str:
        return self._after_stops(self._stops.push(text))

    def _after_stops(self, text: str) -> str:
        if self._tools.found is not None:
            self._tool_text += text
            return ""
        shown = self._tools.push(text)
        if self._tools.found is not None:
            self._tool_text = BEGIN + self._tools.rest
        self.content += shown
        return shown
