"""The JSON that OpenAI's clients expect: whole answers and the events of streams. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollwire.rollout.agents.answer import Answer, Delta
from rollwire.rollout.agents.desk import MODEL
from rollwire.rpc.versions import version_text

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Head:
    """What every body of one call begins with.

    Attributes:
        call_id: Its `id`.
        created_s: Seconds since 1970.
    """

    call_id: str
    created_s: int

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Returns a body."""
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created_s,
            "model": MODEL,
            "choices": choices,
            **more,
        }


class Bodies(Protocol):
    """Writes the bodies of one kind of call."""

    kind: str
    chunk_kind: str

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Returns the choice of a whole answer."""

    def first(self) -> dict[str, Any] | None:
        """Returns the choice of a stream's first event; None if there is none."""

    def delta(self, delta: Delta) -> dict[str, Any]:
        """Returns the choice of a piece."""

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the choices that end a stream."""


class ChatBodies:
    """Bodies of chat completions.

    Args:
        decode: Text of token ids, for log-probabilities; None if none are wanted.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode

    def whole(self, answer: Answer) -> dict[str, Any]:
        """See `Bodies`."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.tool_calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [call.as_json() for call in answer.tool_calls]
        logprobs = self._logprobs([(piece.token_ids, piece.logprobs) for piece in answer.pieces])
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def first(self) -> dict[str, Any] | None:
        """See `Bodies`."""
        return _chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> dict[str, Any]:
        """See `Bodies`."""
        return _chunk({"content": delta.text}, logprobs=self._logprobs([(delta.token_ids, delta.logprobs)]))

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """See `Bodies`."""
        calls = [{"index": index, **call.as_json()} for index, call in enumerate(answer.tool_calls)]
        choices = [_chunk({"tool_calls": calls})] if calls else []
        return [*choices, _chunk({}, finish_reason=answer.finish_reason)]

    def _logprobs(self, pieces: list[tuple[Sequence[int], Sequence[float]]]) -> dict[str, Any] | None:
        if self._decode is None:
            return None
        entries = []
        for token_ids, logprobs in pieces:
            for token, logprob in zip(token_ids, logprobs, strict=True):
                text = self._decode([token])
                shown = None if "\ufffd" in text else list(text.encode())
                entries.append({"token": text, "logprob": logprob, "bytes": shown, "top_logprobs": []})
        return {"content": entries, "refusal": None}


class CompletionBodies:
    """Bodies of text completions.

    Args:
        decode: As for `ChatBodies`.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._offset = 0

    def whole(self, answer: Answer) -> dict[str, Any]:
        """See `Bodies`."""
        pieces = answer.pieces
        token_ids = [token for piece in pieces for token in piece.token_ids]
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        return self._choice(answer.content, self._logprobs(token_ids, logprobs), answer.finish_reason)

    def first(self) -> dict[str, Any] | None:
        """See `Bodies`."""
        return None

    def delta(self, delta: Delta) -> dict[str, Any]:
        """See `Bodies`."""
        return self._choice(delta.text, self._logprobs(delta.token_ids, delta.logprobs), None)

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """See `Bodies`."""
        return [self._choice("", None, answer.finish_reason)]

    def _choice(self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if self._decode is None:
            return None
        texts = [self._decode([token]) for token in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def usage(prompt_tokens: int, answer: Answer) -> dict[str, Any]:
    """Returns the number of tokens of a call."""
    completion = len(answer.response_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


def fingerprint(answer: Answer) -> str:
    """Returns the version of the weights that drew the end of an answer."""
    return version_text(answer.pieces[-1].version)


def _chunk(
    delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
