"""Passing on a version that was received: in full, and as the changes that it came as."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from weakref import WeakSet

from rollwire.rpc.limits import CHUNK_BYTES
from rollwire.rpc.versions import version_text
from rollwire.rpc.weight_assembler import HeldWeights
from rollwire.rpc.weight_pieces import Piece, whole_piece
from rollwire.rpc.weight_publisher import WeightStream, changes_wanted, delta_stream, unchanged, unknown_version
from rollwire.v1 import weights_pb2


class WeightRelay:
    """Answers `FetchWeights` with the version that a reader holds. Thread-safe.

    A stream reads the held memory while it is sent, so it is cut when that is replaced; it then has no commit, whatever
    it sent, and its reader discards it.
    """

    def __init__(self) -> None:
        self._held: HeldWeights | None = None
        self._streams: WeakSet[WeightStream] = WeakSet()
        self._lock = Lock()

    def hold(self, held: HeldWeights) -> None:
        """Passes on another version from now on; after this the one before may be released."""
        with self._lock:
            for stream in list(self._streams):
                stream.cut()
            self._held = held

    def open(self, request: weights_pb2.FetchWeightsRequest) -> WeightStream:
        """Returns the stream that answers a request.

        Changes are sent to a reader that has the version which this one was made from here, or this very one.

        Raises:
            RollwireError: NOT_FOUND / `UNKNOWN_VERSION`.
        """
        wanted = request.version if request.HasField("version") else None
        with self._lock:
            held = self._held
            if held is None:
                raise unknown_version(wanted, "is not held, and no other one is")
            if wanted not in (None, held.version):
                raise unknown_version(wanted, f"is not held; the present one is {version_text(held.version)}")
            stream = _stream(held, request)
            self._streams.add(stream)
            return stream


def _stream(held: HeldWeights, request: weights_pb2.FetchWeightsRequest) -> WeightStream:
    step = None
    if changes_wanted(request):
        if request.have == held.version:
            step = unchanged(held.version, held.digest, len(held.tensors))
        elif held.step is not None and request.have == held.step.base:
            step = held.step
    manifest = held.manifest()
    if step is not None:
        return delta_stream(
            manifest, step, lambda spec: _pieces(held, spec.name), request, held.shared(), held.low_rank
        )
    return WeightStream(manifest, (piece for name in held.tensors for piece in _pieces(held, name)), held.shared())


def _pieces(held: HeldWeights, name: str) -> Iterator[Piece]:
    """Yields a tensor's bytes in pieces that are short enough for a stream that is cut to end soon."""
    data = held.tensors[name].data
    for start in range(0, data.nbytes, CHUNK_BYTES):
        yield whole_piece(data[start : start + CHUNK_BYTES])
