"""Resident memory of every server, `system/rss_mib/<service>`: as servers report it, or as the kernel shows it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rollwire.coordinator.metrics import Metrics
from rollwire.coordinator.peers import Peers
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.limits import MIB

ASK_TIMEOUT_S: Final = 2.0


def process_resident_bytes(pid: int | None = None) -> int:
    """Returns the resident set size of a process on this host, this one by default; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """Measures the memory of all servers.

    Args:
        peers: The servers; rollout servers and the learner report theirs.
        children: Process ids of servers on this host by kind, for kinds that do not report theirs.
    """

    def __init__(self, peers: Peers, children: Callable[[], Mapping[str, int]]) -> None:
        self._peers = peers
        self._children = children

    async def measure(self) -> Metrics:
        """Returns mebibytes by service; servers that do not answer at once are left out."""
        found = {"coordinator": process_resident_bytes()}
        found.update({kind: process_resident_bytes(pid) for kind, pid in self._children().items()})
        try:
            rollouts = [await client.get_info(timeout_s=ASK_TIMEOUT_S) for client in self._peers.rollouts]
            found["rollout"] = sum(info.resident_bytes for info in rollouts)
            found["learner"] = (await self._peers.learner.get_info(timeout_s=ASK_TIMEOUT_S)).resident_bytes
        except RollwireError:
            pass  # a server that is lost is reported by whoever needs it
        return {f"system/rss_mib/{kind}": size / MIB for kind, size in found.items() if size}
