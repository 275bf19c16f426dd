"""Text from tokens as they are drawn, and texts that are looked for in it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_INCOMPLETE: Final = "\ufffd"
"""What tokenizers put where bytes are no complete character yet."""


class TokenText:
    """Decodes a growing list of tokens; a character that spans tokens appears when it is complete.

    Args:
        decode: Text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # Text up to `_read` was returned; decoding starts at `_begin`, so that joints between tokens come out right.
        self._begin = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Adds a token and returns the text that became complete."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._begin : self._read])
        text = self._decode(self._tokens[self._begin :])
        if text.endswith(_INCOMPLETE) or len(text) <= len(known):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def finish(self) -> str:
        """Returns the rest; bytes that never became a character stay visible as a replacement character."""
        known = self._decode(self._tokens[self._begin : self._read])
        rest = self._decode(self._tokens[self._begin :])[len(known) :]
        self._begin = self._read = len(self._tokens)
        return rest


class Scanner:
    """Looks for the first of several texts in a stream; holds back what may be the beginning of one.

    Args:
        wanted: The texts, none of them empty.

    Attributes:
        found: The text that was found; None so far.
        rest: What followed it in the same push.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = tuple(wanted)
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def push(self, text: str) -> str:
        """Adds text and returns what lies before any of the wanted texts for certain."""
        assert self.found is None, "the search has ended"
        whole = self._held + text
        places = [(whole.find(wanted), wanted) for wanted in self._wanted]
        place, wanted = min(((place, wanted) for place, wanted in places if place >= 0), default=(-1, ""))
        if place >= 0:
            self.found, self.rest, self._held = wanted, whole[place + len(wanted) :], ""
            return whole[:place]
        kept = max((_overlap(whole, wanted) for wanted in self._wanted), default=0)
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]

    def finish(self) -> str:
        """Returns what was held back."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, wanted: str) -> int:
    """Returns the length of the longest end of a text with which `wanted` begins, short of all of it."""
    for length in range(min(len(text), len(wanted) - 1), 0, -1):
        if wanted.startswith(text[len(text) - length :]):
            return length
    return 0
