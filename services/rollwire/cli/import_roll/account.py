"""What became of every key of a ROLL file, and how that is reported."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

Path = tuple[str, ...]


class Fate(enum.Enum):
    """What became of a key; the values are the headings of the report."""

    MAPPED = "mapped as they are"
    CHANGED = "mapped with a change"
    UNKNOWN = "unknown: no key of ROLL's agentic pipeline"
    IGNORED = "ignored: Rollwire has no use for it"
    DEAD = "dead in ROLL too: nothing there reads it"
    UNSUPPORTED = "unsupported: Rollwire does not do this yet"
    UNSTATED = "not in the file: a default of ROLL that was replaced"


REPORTED = (Fate.UNKNOWN, Fate.CHANGED, Fate.IGNORED, Fate.DEAD, Fate.UNSUPPORTED, Fate.UNSTATED)
"""Fates that people are told about, in this order."""


@dataclass(frozen=True)
class Entry:
    """The fate of one key.

    Attributes:
        fate: What became of it.
        why: Why, for people; empty where it is mapped as it is.
    """

    fate: Fate
    why: str = ""


class Account:
    """Keys and their fates. A key that is used twice keeps what has to be told about it."""

    def __init__(self) -> None:
        self._entries: dict[Path, Entry] = {}

    def __contains__(self, path: Path) -> bool:
        return path in self._entries

    def __iter__(self) -> Iterator[Path]:
        return iter(self._entries)

    def mark(self, paths: Iterable[Path], fate: Fate, why: str = "") -> None:
        """Records a fate of some keys.

        Args:
            paths: The keys.
            fate: What became of them.
            why: Why, one line; needed unless they are mapped as they are.
        """
        assert bool(why) != (fate is Fate.MAPPED), f"{fate} needs a reason, and MAPPED none"
        for path in paths:
            known = self._entries.get(path)
            if known is None or known.fate is Fate.MAPPED:
                self._entries[path] = Entry(fate, why)
            elif fate is not Fate.MAPPED and why not in known.why:
                self._entries[path] = Entry(known.fate, f"{known.why}; {why}")

    def entry(self, path: Path) -> Entry:
        """Returns the fate of a key. Raises `KeyError`."""
        return self._entries[path]

    def select(self, fate: Fate) -> list[tuple[Path, str]]:
        """Returns keys of one fate with the reasons, in the order in which they were met."""
        return [(path, entry.why) for path, entry in self._entries.items() if entry.fate is fate]


def dotted(path: Path) -> str:
    """Returns a key as people write it."""
    return ".".join(path)


def report(name: str, account: Account, order: Sequence[Path], written_key: Callable[[Path], Path]) -> str:
    """Returns what happened to the keys of a file: a line for each that was not mapped as it is, grouped by fate.

    Args:
        name: Name of the file.
        account: Fates.
        order: The keys of the file, in its order.
        written_key: Returns the key as it is written in the file; one that stands for many is told of once if all of
            them have the same fate.
    """
    position = {path: index for index, path in enumerate(order)}
    counts = {fate: sum(account.entry(path).fate is fate for path in order) for fate in Fate if fate != Fate.UNSTATED}
    summary = ", ".join(f"{count} {fate.value.partition(':')[0]}" for fate, count in counts.items() if count)
    alike: dict[Path, set[Entry]] = {}
    for path in account:
        alike.setdefault(written_key(path), set()).add(account.entry(path))

    def shown(path: Path) -> Path:
        return written_key(path) if len(alike[written_key(path)]) == 1 else path

    lines = [f"{name}: {len(order)} keys: {summary}"]
    for fate in REPORTED:
        found = sorted(account.select(fate), key=lambda item: position.get(item[0], len(position)))
        if found:
            lines += ["", f"{fate.value[0].upper()}{fate.value[1:]}"]
            lines += dict.fromkeys(f"  {dotted(shown(path))}: {why}" for path, why in found)
    return "\n".join(lines)
