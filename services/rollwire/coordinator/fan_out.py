"""Which source each of many readers fetches a version from, so that they do not all queue on the learner. Pure.

The first readers are sent to the learner. Whoever has the version passes it on, so the number of sources grows with
every reader that is done.
"""

from __future__ import annotations

from typing import Final

READERS_PER_SOURCE: Final = 4
"""Readers that one source sends to at once: enough to fill its link, few enough that each is done soon."""


class FanOut:
    """The sources of one version.

    Args:
        origin: Target that has the version from the beginning and can always be asked.
        readers_per_source: Readers that one source sends to at once.
    """

    def __init__(self, origin: str, readers_per_source: int = READERS_PER_SOURCE) -> None:
        self.origin = origin
        self._readers_per_source = readers_per_source
        self._readers = {origin: 0}

    def take(self) -> str | None:
        """Returns the source with the fewest readers and gives it one more, a relay rather than the origin.

        None when every source has as many as it may have: ask again after `give_back`, which must follow each `take`.
        """
        source = min(self._readers, key=lambda target: (self._readers[target], target == self.origin))
        if self._readers[source] >= self._readers_per_source:
            return None
        self._readers[source] += 1
        return source

    def give_back(self, source: str) -> None:
        """Notes that a reader of a source has ended, however that was."""
        if source in self._readers:
            self._readers[source] -= 1

    def add(self, relay: str) -> None:
        """Notes that a reader has the version and can pass it on."""
        self._readers.setdefault(relay, 0)

    def drop(self, relay: str) -> None:
        """Sends nobody to a relay any more; the origin stays."""
        if relay != self.origin:
            self._readers.pop(relay, None)
