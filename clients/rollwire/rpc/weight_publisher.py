"""The sender's side of weight updates: the present version for any number of readers, and what changed before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock
from typing import Final, TypeAlias
from weakref import WeakSet

import grpc

from rollwire.rpc.errors import Reason, RollwireError, not_found
from rollwire.rpc.limits import CHUNK_BYTES
from rollwire.rpc.memory_file import FileMapping, GrowingFile, SharedVersion
from rollwire.rpc.versions import version_text
from rollwire.rpc.weight_delta import UNCHANGED
from rollwire.rpc.weight_lanes import Lanes, default_threads
from rollwire.rpc.weight_low_rank import LowRank, declared_bases
from rollwire.rpc.weight_manifest import HostTensor, TensorLayout
from rollwire.rpc.weight_pieces import Piece, PieceQueue, whole_piece
from rollwire.rpc.weight_snapshot import Snapshot, SnapshotBuilder
from rollwire.rpc.weight_steps import KEPT_CHANGES, Step, Steps, version_key
from rollwire.rpc.weight_wire import write_chunk, write_commit, write_manifest
from rollwire.v1 import weights_pb2

PublishedTensor: TypeAlias = tuple[str, TensorLayout, Iterable[memoryview]]
"""Name, layout and bytes in order; each piece flat, of whole elements, and not needed after the next one was taken."""

_PENDING_JOBS: Final = 4
_RETRY_S: Final = 1.0
DELTA_ENCODINGS: Final = {weights_pb2.TENSOR_ENCODING_UNCHANGED, weights_pb2.TENSOR_ENCODING_SPARSE}


class WeightStream:
    """The serialised messages of one stream; iterate once. Each piece of the version is let go when it is sent.

    Args:
        manifest: Table of contents.
        pieces: The payload.
        shared: The version as a file, where that may be handed over instead.

    Attributes:
        queue: What is still to be sent.
    """

    def __init__(
        self, manifest: weights_pb2.WeightManifest, pieces: Iterable[Piece], shared: SharedVersion | None = None
    ) -> None:
        self.manifest = manifest
        self.shared = shared
        self.queue = PieceQueue(pieces)
        self._superseded = False

    def __iter__(self) -> Iterator[bytes]:
        yield write_manifest(self.manifest)
        offset = 0
        while True:
            with self.queue.lock:
                pieces = self.queue.take(CHUNK_BYTES)
                chunk = write_chunk(offset, [piece.data for piece in pieces], pieces[0].crc32) if pieces else None
            if chunk is None:
                break
            offset += chunk.size
            yield chunk.message
        self.check()
        yield write_commit(self.manifest)

    def handed_over(self) -> Iterator[bytes]:
        """Yields the messages for a reader that has `shared.file` open."""
        assert self.shared is not None
        yield write_manifest(self.shared.manifest)
        yield weights_pb2.FetchWeightsResponse(
            file=weights_pb2.WeightFile(tensor_offsets=self.shared.offsets)
        ).SerializeToString()
        self.check()
        yield write_commit(self.shared.manifest)

    def cut(self) -> None:
        """Frees what has not been sent; the stream then ends with NOT_FOUND / `UNKNOWN_VERSION`."""
        self._superseded = True
        self.queue.clear()

    def check(self) -> None:
        """Raises NOT_FOUND / `UNKNOWN_VERSION` if the stream was cut."""
        if self._superseded:
            raise unknown_version(self.manifest.version, "was replaced while it was being sent")


class WeightPublisher:
    """Holds the present version and what changed in the latest steps. Thread-safe.

    A version is encoded once, whatever the number of readers: what changed is found when it is published, and what
    changed since an earlier version is composed at the first request for it.

    The present version lies in a file in memory, which a reader on this host can be given instead of a stream. Each
    version is written over the one before; who reads the file meanwhile gets a mixture, which the digests show.

    Host memory, as a share of the version's size in the serving dtype: 1 for the present version, at most `delta_share`
    for changes, one chunk for each reader. While publishing also one piece of a tensor, and for each thread 4 chunks
    and about 30 MiB. Streams that still send the version before the present one keep what they have not sent, together
    at most 1 more; streams of older ones are cut.

    Args:
        kept_bases: Number of earlier versions that readers can be brought up from without sending everything.
        delta_share: Most memory for changes; a step that changed more is sent in full.
        threads: Threads that hash and compare while publishing; None for the machine's default, 0 for none.
        chunk_bytes: Payload of a chunk, 16 KiB to 2 MiB.
    """

    def __init__(
        self,
        *,
        kept_bases: int = 4,
        delta_share: float = KEPT_CHANGES,
        threads: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._delta_share = delta_share
        self._threads = default_threads() if threads is None else threads
        self._chunk_bytes = chunk_bytes
        self._file = GrowingFile()
        self._present: Snapshot | None = None  # None also while it is being replaced
        self._manifest: weights_pb2.WeightManifest | None = None
        self._next: weights_pb2.WeightVersion | None = None
        self._steps = Steps(kept_bases)
        self._streams: WeakSet[WeightStream] = WeakSet()
        self._lock = Lock()
        self._publishing = Lock()

    @property
    def manifest(self) -> weights_pb2.WeightManifest | None:
        """Manifest of the version published last, in full; None before the first one and after one that failed."""
        return self._manifest

    @property
    def delta_bytes(self) -> int:
        """Memory that changes take."""
        return self._steps.held_bytes

    def publish(
        self,
        version: weights_pb2.WeightVersion,
        tensors: Iterable[PublishedTensor],
        low_rank: Mapping[str, LowRank] | None = None,
    ) -> weights_pb2.WeightManifest:
        """Replaces the present version.

        Until it returns, new requests are told to come again. If it raises, no version is held any more: publish again.

        Args:
            version: The new version.
            tensors: Every tensor once, always in the same order.
            low_rank: What tensors are made from by adding adapters, by name. It may be filled while `tensors` is
                iterated: what concerns a tensor must be there when the tensor is.

        Returns:
            The manifest of the new version in full.

        Raises:
            ValueError: A tensor occurs twice or its pieces do not have its size.
        """
        with self._publishing:
            base = self.manifest
            self._steps.begin(int(self._delta_share * base.payload_bytes) if base is not None else 0)
            try:
                with Lanes(self._threads, _PENDING_JOBS) as lanes:
                    builder = SnapshotBuilder(
                        version,
                        self._file,
                        self._begin(version),
                        lanes,
                        self._chunk_bytes,
                        self._steps.reserve,
                        low_rank,
                    )
                    for name, layout, pieces in tensors:
                        builder.add(name, layout, pieces)
                    snapshot, changes = builder.finish()
            except BaseException:
                self._commit(None, None)
                raise
            step = None
            if base is not None and changes is not None:
                step = Step(base.version, base.digest, version_key(version), changes)
            self._commit(snapshot, step)
            return snapshot.manifest

    def open(self, request: weights_pb2.FetchWeightsRequest) -> WeightStream:
        """Returns the stream that answers a request. May compose changes, which takes a moment: call it in a thread.

        Raises:
            RollwireError: NOT_FOUND / `UNKNOWN_VERSION`; UNAVAILABLE / `WEIGHT_SOURCE_UNAVAILABLE` with a retry delay
                while the version is being published.
        """
        wanted = request.version if request.HasField("version") else None
        step = self._step(request, wanted)
        with self._lock:
            present = self._current(wanted)
            if step is not None and step.target == version_key(present.manifest.version):
                stream = delta_stream(
                    present.manifest,
                    step,
                    lambda spec: present.pieces(spec.payload_offset, spec.payload_bytes),
                    request,
                    present.shared(),
                    present.low_rank,
                )
            else:
                stream = _full_stream(present)
            self._streams.add(stream)
            return stream

    def tensors(self) -> Iterator[tuple[str, HostTensor]]:
        """Yields a copy of each tensor of the present version; publishing the next one meanwhile changes nothing.

        Raises:
            RollwireError: As `open` without a version; NOT_FOUND / `UNKNOWN_VERSION` when the one after the next is
                published meanwhile.
        """
        with self._lock:
            stream = _full_stream(self._current(None))
            self._streams.add(stream)
        return ((spec.name, _copied(stream, spec)) for spec in stream.manifest.tensors)

    def _begin(self, version: weights_pb2.WeightVersion) -> Snapshot | None:
        with self._lock:
            previous, self._present, self._next = self._present, None, version
            streams = list(self._streams)
        lasting = []
        for stream in streams:
            if previous is not None and stream.manifest.version == previous.manifest.version:
                lasting.append(stream)
            else:
                stream.cut()
        if previous is not None:
            _preserve(lasting, previous.file)
        return previous

    def _commit(self, snapshot: Snapshot | None, step: Step | None) -> None:
        self._steps.commit(step)
        with self._lock:
            self._present, self._next = snapshot, None
            self._manifest = snapshot.manifest if snapshot is not None else None

    def _current(self, wanted: weights_pb2.WeightVersion | None) -> Snapshot:
        """Returns the present version if it is the one wanted; the lock is held."""
        if self._present is None:
            if self._next is not None and wanted in (None, self._next):
                raise RollwireError(
                    grpc.StatusCode.UNAVAILABLE,
                    Reason.WEIGHT_SOURCE_UNAVAILABLE,
                    f"version {version_text(self._next)} is being published; ask again in {_RETRY_S:g} s",
                    retry_after_s=_RETRY_S,
                )
            raise unknown_version(wanted, "is not held, and no other one is")
        version = self._present.manifest.version
        if wanted not in (None, version):
            raise unknown_version(wanted, f"is not held; the present one is {version_text(version)}")
        return self._present

    def _step(self, request: weights_pb2.FetchWeightsRequest, wanted: weights_pb2.WeightVersion | None) -> Step | None:
        """Returns what the reader needs beside what it has; None when it must get everything."""
        if not changes_wanted(request):
            return None
        with self._lock:
            present = self._current(wanted)
        target = version_key(present.manifest.version)
        if version_key(request.have) == target:
            return unchanged(request.have, present.manifest.digest, len(present.layouts))
        return self._steps.find(version_key(request.have), target, list(present.layouts.values()))


def changes_wanted(request: weights_pb2.FetchWeightsRequest) -> bool:
    """Tells whether a reader has a version and can apply changes to it."""
    return request.HasField("have") and DELTA_ENCODINGS.issubset(request.accepted_encodings)


def delta_stream(
    full: weights_pb2.WeightManifest,
    step: Step,
    pieces: Callable[[weights_pb2.TensorSpec], Iterable[Piece]],
    request: weights_pb2.FetchWeightsRequest,
    shared: SharedVersion | None,
    low_rank: Mapping[str, LowRank],
) -> WeightStream:
    """Returns the stream of a step, compressed if the reader accepts that, adapted tensors as adapters if it can merge.

    Taking a version over as a file is a little faster than making it from changes, but a reader that has the changes
    can pass them on. So there is a choice only where they are too many to be kept, and where there are adapters, which
    take far longer to merge than a file to copy.

    Args:
        full: Manifest that sends the version in full.
        step: What changed.
        pieces: Returns the payload of a tensor, for the ones sent in full.
        request: The reader's.
        shared: The version as a file.
        low_rank: Adapters of the version.
    """
    manifest = weights_pb2.WeightManifest(
        version=full.version, base=step.base, digest=full.digest, base_digest=step.base_digest
    )
    compressed = weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD in request.accepted_encodings
    if not merges(request, full):
        low_rank = {}
    payload: list[Piece] = []
    for whole, known in zip(full.tensors, step.changes, strict=True):
        spec = manifest.tensors.add()
        spec.CopyFrom(whole)
        spec.payload_offset = manifest.payload_bytes
        change = known if known is None or compressed else known.plain()
        adapter = low_rank.get(whole.name)
        if adapter is not None and len(adapter.payload) < (whole.byte_size if change is None else len(change.payload)):
            spec.encoding = weights_pb2.TENSOR_ENCODING_LOW_RANK
            spec.payload_bytes = len(adapter.payload)
            spec.low_rank = adapter.rank
            payload.append(whole_piece(adapter.payload))
        elif change is None:
            payload.extend(pieces(whole))
        else:
            spec.encoding = change.encoding
            spec.payload_bytes = len(change.payload)
            spec.changed_elements = change.changed
            spec.sparse_bytes = change.sparse_bytes
            payload.append(whole_piece(change.payload))
        manifest.payload_bytes += spec.payload_bytes
    large = manifest.payload_bytes > KEPT_CHANGES * full.payload_bytes
    merged = any(spec.encoding == weights_pb2.TENSOR_ENCODING_LOW_RANK for spec in manifest.tensors)
    return WeightStream(manifest, payload, shared if large or merged else None)


def merges(request: weights_pb2.FetchWeightsRequest, manifest: weights_pb2.WeightManifest) -> bool:
    """Tells whether a reader keeps all that adapters of a version are added to."""
    accepted = weights_pb2.TENSOR_ENCODING_LOW_RANK in request.accepted_encodings
    return accepted and bool(request.low_rank_bases) and request.low_rank_bases == declared_bases(manifest)


def unchanged(version: weights_pb2.WeightVersion, digest: bytes, tensors: int) -> Step:
    """Returns the step of a reader that has the version already."""
    return Step(version, digest, version_key(version), [UNCHANGED] * tensors)


def _full_stream(present: Snapshot) -> WeightStream:
    return WeightStream(present.manifest, present.pieces(0, present.manifest.payload_bytes), present.shared())


def _preserve(streams: list[WeightStream], file: FileMapping) -> None:
    """Copies what streams have still to send from a file that is about to be overwritten."""
    for stream in streams:
        for chunk in stream.queue.chunks():
            if chunk.data.obj is file:
                chunk.copy()
    for stream in streams:
        with stream.queue.lock:  # whoever was reading the old bytes has done so now
            pass


def _copied(stream: WeightStream, spec: weights_pb2.TensorSpec) -> HostTensor:
    parts, missing = [], spec.byte_size
    while missing:
        with stream.queue.lock:
            taken = stream.queue.take(missing)
            parts += [bytes(piece.data) for piece in taken]
        stream.check()
        missing -= sum(piece.size for piece in taken)
    return HostTensor(spec.dtype, tuple(spec.shape), memoryview(b"".join(parts)))


def unknown_version(version: weights_pb2.WeightVersion | None, what: str) -> RollwireError:
    """Returns the error of a version that cannot be had; None stands for the present one."""
    name = version_text(version) if version is not None else "the present one"
    return not_found(Reason.UNKNOWN_VERSION, f"version {name} {what}", version=name)
