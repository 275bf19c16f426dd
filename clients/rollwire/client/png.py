"""PNG files from arrays, with zlib alone."""

from __future__ import annotations

import struct
import zlib

import numpy as np

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_SIDE_PIXELS = 4096


def encode_png(picture: object) -> bytes:
    """Encodes a picture.

    Args:
        picture: uint8[height, width, 3], red, green, blue; sides of 1 to 4096 pixels.

    Raises:
        ValueError: It is no such array.
    """
    if (
        not isinstance(picture, np.ndarray)
        or picture.dtype != np.uint8
        or picture.ndim != 3
        or picture.shape[2] != 3
        or not all(1 <= side <= MAX_SIDE_PIXELS for side in picture.shape[:2])
    ):
        what = f"{picture.dtype}{list(picture.shape)}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise ValueError(f"the picture is {what}; allowed: uint8[1..{MAX_SIDE_PIXELS}, 1..{MAX_SIDE_PIXELS}, 3]")
    height, width, _ = picture.shape
    # Each row starts with its filter type; 0 is none.
    rows = np.pad(picture.reshape(height, width * 3), ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        (PNG_SIGNATURE, _chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows.tobytes())), _chunk(b"IEND", b""))
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
