"""Finds the longest known beginning of a byte string, at the cost of hashing the string once."""

from __future__ import annotations

import bisect
import hashlib
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class PrefixIndex(Generic[ValueT]):
    """Values by byte strings; of equal strings, the value that came last counts. Keeps digests, not the strings."""

    def __init__(self) -> None:
        self._values: dict[bytes, ValueT] = {}
        self._lengths: list[int] = []

    def add(self, text: bytes, value: ValueT) -> None:
        """Adds a value under a string."""
        self._values[hashlib.sha256(text).digest()] = value
        place = bisect.bisect_left(self._lengths, len(text))
        if place == len(self._lengths) or self._lengths[place] != len(text):
            self._lengths.insert(place, len(text))

    def longest(self, text: bytes) -> tuple[ValueT, int] | None:
        """Returns the value of the longest string with which `text` begins, and that string's length."""
        found: tuple[ValueT, int] | None = None
        hashed, begin = hashlib.sha256(), 0
        for length in self._lengths:
            if length > len(text):
                break
            hashed.update(text[begin:length])
            begin = length
            digest = hashed.copy().digest()
            if digest in self._values:
                found = self._values[digest], length
        return found
