"""What changed between published versions, within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, TypeAlias

from rollwire.rpc.weight_delta import SparseTensor, compose
from rollwire.rpc.weight_manifest import ELEMENT_BYTES, TensorLayout
from rollwire.v1 import weights_pb2

SPARSE_LIMIT: Final = 0.75
"""A tensor whose sparse payload, before compression, exceeds this share of its size is sent in full."""

KEPT_CHANGES: Final = 0.15
"""Most memory for changes that are kept, as a share of the version's size."""

VersionKey: TypeAlias = tuple[str, int]


def version_key(version: weights_pb2.WeightVersion) -> VersionKey:
    """Returns a version as something that a dictionary can hold."""
    return version.lineage, version.step


@dataclass(frozen=True)
class Step:
    """What changed from one version to a later one.

    Attributes:
        base: The earlier version.
        base_digest: Digest of it.
        target: The later version.
        changes: The change of each tensor in the manifest's order; None for a tensor to be sent in full.
    """

    base: weights_pb2.WeightVersion
    base_digest: bytes
    target: VersionKey
    changes: list[SparseTensor | None]

    @property
    def held_bytes(self) -> int:
        """Memory that the payloads take."""
        return sum(len(change.payload) for change in self.changes if change is not None)


class Steps:
    """The latest steps, one for each base. Thread-safe.

    Args:
        kept_bases: Most steps held.
    """

    def __init__(self, kept_bases: int) -> None:
        self._kept_bases = kept_bases
        self._steps: dict[VersionKey, Step] = {}  # by base, oldest first
        self._limit_bytes = 0
        self._reserved_bytes = 0
        self._lock = Lock()
        self._composing = Lock()

    @property
    def held_bytes(self) -> int:
        """Memory that all steps take, with what is reserved for the next one."""
        with self._lock:
            return self._held_bytes()

    def begin(self, limit_bytes: int) -> None:
        """Starts the next step, which together with the others may take `limit_bytes`."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._reserved_bytes = 0

    def reserve(self, more_bytes: int) -> bool:
        """Says that the next step grew, for which the oldest are dropped; False when it is too large by itself."""
        with self._lock:
            self._reserved_bytes += more_bytes
            self._make_room()
            return self._reserved_bytes <= self._limit_bytes

    def commit(self, step: Step | None) -> None:
        """Adds the next step; None ends every chain, since nothing leads to the new version."""
        with self._lock:
            self._reserved_bytes = 0
            if step is None:
                self._steps.clear()
                return
            self._steps.pop(version_key(step.base), None)
            self._steps[version_key(step.base)] = step
            while len(self._steps) > self._kept_bases:
                self._drop_oldest()

    def find(self, base: VersionKey, target: VersionKey, layouts: Sequence[TensorLayout]) -> Step | None:
        """Returns what changed from one version to another, composed once; None when that is not known."""
        with self._composing:
            with self._lock:
                chain = self._chain(base, target)
            if len(chain) < 2:
                return chain[0] if chain else None
            step = _composed(chain, layouts)
            with self._lock:
                if self._steps.get(base) is chain[0]:
                    self._steps[base] = step
                    self._make_room()
            return step

    def _chain(self, base: VersionKey, target: VersionKey) -> list[Step]:
        """Returns the steps that lead from one version to another; none when they do not."""
        chain: list[Step] = []
        while base != target:
            step = self._steps.get(base)
            if step is None or len(chain) == len(self._steps):
                return []
            chain.append(step)
            base = step.target
        return chain

    def _held_bytes(self) -> int:
        return self._reserved_bytes + sum(step.held_bytes for step in self._steps.values())

    def _make_room(self) -> None:
        while self._steps and self._held_bytes() > self._limit_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        del self._steps[next(iter(self._steps))]


def _composed(chain: Sequence[Step], layouts: Sequence[TensorLayout]) -> Step:
    changes: list[SparseTensor | None] = []
    for at, layout in enumerate(layouts):
        parts = [step.changes[at] for step in chain]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            changes.append(None)
        else:
            limit_bytes = int(SPARSE_LIMIT * layout.byte_size)
            changes.append(compose(known, ELEMENT_BYTES[layout.dtype], layout.elements, limit_bytes))
    return Step(chain[0].base, chain[0].base_digest, chain[-1].target, changes)
