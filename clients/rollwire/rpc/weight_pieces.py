"""What a stream has still to send: pieces of payload that may be replaced by copies while it sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock


class PayloadChunk:
    """Bytes of a version, shared by all streams that send them.

    Attributes:
        data: The bytes; another object with the same content after `copy`.
        crc32: Their checksum, if it is known.
    """

    __slots__ = ("crc32", "data")

    def __init__(self, data: memoryview, crc32: int | None = None) -> None:
        self.data = data
        self.crc32 = crc32

    def copy(self) -> None:
        """Puts a copy in the place of the bytes, whose memory is about to be used for something else."""
        self.data = memoryview(bytes(self.data))


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `end` of a chunk."""

    chunk: PayloadChunk
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start

    @property
    def data(self) -> memoryview:
        """The bytes, which may be overwritten as soon as the lock of the queue is free."""
        return self.chunk.data[self.start : self.end]

    @property
    def crc32(self) -> int | None:
        """Checksum of the bytes, if it is known."""
        return self.chunk.crc32 if self.size == self.chunk.data.nbytes else None


def whole_piece(data: memoryview | bytes | bytearray) -> Piece:
    """Returns a piece of its own with these bytes."""
    view = memoryview(data)
    return Piece(PayloadChunk(view), 0, view.nbytes)


class PieceQueue:
    """Pieces in order. Thread-safe: one thread takes, others may ask for the chunks or drop everything.

    Attributes:
        lock: To be held from `take` until the bytes taken have been copied.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.lock = Lock()
        self._pieces = deque(piece for piece in pieces if piece.size)

    def take(self, size: int) -> list[Piece]:
        """Removes the next `size` bytes, or what there is; the lock is held.

        A piece whose checksum is known comes alone.
        """
        taken: list[Piece] = []
        while size and self._pieces and not (taken and self._pieces[0].crc32 is not None):
            piece = self._pieces.popleft()
            if piece.crc32 is not None and piece.size <= size:
                return [piece]
            if piece.size > size:
                self._pieces.appendleft(Piece(piece.chunk, piece.start + size, piece.end))
                piece = Piece(piece.chunk, piece.start, piece.start + size)
            taken.append(piece)
            size -= piece.size
        return taken

    def chunks(self) -> list[PayloadChunk]:
        """Returns the chunks that are still needed."""
        with self.lock:
            return [piece.chunk for piece in self._pieces]

    def clear(self) -> None:
        """Drops what has not been taken."""
        with self.lock:
            self._pieces.clear()
