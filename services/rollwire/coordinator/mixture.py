"""Which environment each group plays. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollwire.serving.config.environments import TrainEnvironment


class Mixture:
    """Assigns environments to group indices so that every stretch of them follows the weights closely.

    The environment that lags its share most comes next (ties: the one listed first), so that 16 groups with weights
    1:1 are eight of each, whatever the seed. Depends on the index alone. Entries with weight 0 never come.
    """

    def __init__(self, environments: Sequence[TrainEnvironment]) -> None:
        self._environments = [entry for entry in environments if entry.weight > 0]
        total = sum(entry.weight for entry in self._environments)
        self._shares = [entry.weight / total for entry in self._environments]
        self._counts = [0] * len(self._environments)
        self._order: list[int] = []

    def environment(self, index: int) -> TrainEnvironment:
        """Returns the environment of the group with this index."""
        while len(self._order) <= index:
            position = len(self._order) + 1
            lags = [share * position - count for share, count in zip(self._shares, self._counts, strict=True)]
            choice = max(range(len(lags)), key=lambda entry: (lags[entry], -entry))
            self._counts[choice] += 1
            self._order.append(choice)
        return self._environments[self._order[index]]
