"""Published weights: immutable copies in host memory, the newest few of them, and their streams."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollwire.rpc.errors import Reason, not_found
from rollwire.rpc.versions import version_text
from rollwire.rpc.weight_stream import HostTensor, build_manifest, stream_messages
from rollwire.serving.model_tensors import named_weights, to_host
from rollwire.v1 import learner_pb2, weights_pb2


@dataclass(frozen=True)
class Snapshot:
    """One version. Nothing changes it, so that any number of readers may stream it while training goes on.

    Attributes:
        manifest: Table of contents with version and digest.
        tensors: Every weight by name, in the manifest's order.
    """

    manifest: weights_pb2.WeightManifest
    tensors: Mapping[str, HostTensor]

    @property
    def version(self) -> weights_pb2.WeightVersion:
        """The version that this is."""
        return self.manifest.version

    def messages(self) -> Iterator[learner_pb2.FetchWeightsResponse]:
        """Yields the messages of one stream: manifest, chunks, commit."""
        return stream_messages(self.manifest, [tensor.data for tensor in self.tensors.values()])


def take_snapshot(model: Any, version: weights_pb2.WeightVersion, serving_dtype: torch.dtype) -> Snapshot:
    """Copies a model's weights to host memory, floating-point ones as `serving_dtype`."""
    tensors = {}
    for name, tensor in named_weights(model):
        dtype = serving_dtype if tensor.is_floating_point() else tensor.dtype
        # Always a copy, even where nothing is cast or moved: the optimizer changes weights in place.
        tensors[name] = to_host(tensor.detach().to(dtype, copy=True), serving_dtype)
    return Snapshot(build_manifest(version, tensors), tensors)


class PublishedVersions:
    """The newest `kept` versions. A reader that has begun keeps its snapshot alive beyond that."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._snapshots: OrderedDict[tuple[str, int], Snapshot] = OrderedDict()

    def add(self, snapshot: Snapshot) -> None:
        """Publishes a version and lets go of the oldest if there are more than `kept`."""
        self._snapshots[snapshot.version.lineage, snapshot.version.step] = snapshot
        while len(self._snapshots) > self._kept:
            self._snapshots.popitem(last=False)

    @property
    def latest(self) -> Snapshot:
        """The newest version."""
        return next(reversed(self._snapshots.values()))

    def get(self, version: weights_pb2.WeightVersion) -> Snapshot:
        """Returns a version; an unset one means the newest.

        Raises:
            RollwireError: NOT_FOUND / `UNKNOWN_VERSION`.
        """
        if not version.lineage:
            return self.latest
        found = self._snapshots.get((version.lineage, version.step))
        if found is None:
            held = ", ".join(version_text(snapshot.version) for snapshot in self._snapshots.values())
            raise not_found(
                Reason.UNKNOWN_VERSION,
                f"version {version_text(version)} is not held; held: {held}. "
                "Fetch the present one, or raise learner.versions_kept",
                version=version_text(version),
                held=held,
            )
        return found
