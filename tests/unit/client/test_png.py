"""The PNG encoder, read back by an independent decoder."""

import io

import numpy as np
import pytest
from PIL import Image

from rollwire.client.png import MAX_SIDE_PIXELS, encode_png
from rollwire.environment.frozen_lake import FrozenLake


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 5, 3), (64, 1, 3), (1, MAX_SIDE_PIXELS, 3)])
def test_a_picture_survives(shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    decoded = Image.open(io.BytesIO(encode_png(picture)))
    assert decoded.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(decoded), picture)


def test_a_view_with_strides_survives() -> None:
    picture = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)[::-1, ::2]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(picture)))), picture)


def test_the_lake_is_a_picture() -> None:
    lake = FrozenLake()
    lake.reset(42)
    png = encode_png(lake.render_rgb())
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), lake.render_rgb())


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [[1, 2, 3]],
        np.zeros((2, 2), np.uint8),
        np.zeros((2, 2, 4), np.uint8),
        np.zeros((2, 2, 3), np.float32),
        np.zeros((0, 2, 3), np.uint8),
        np.zeros((1, MAX_SIDE_PIXELS + 1, 3), np.uint8),
    ],
)
def test_other_arrays_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="allowed: uint8"):
        encode_png(wrong)
