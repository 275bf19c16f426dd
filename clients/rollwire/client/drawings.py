"""Drawings of environments as messages of the contract."""

from __future__ import annotations

from typing import Any

from rollwire.client.png import encode_png
from rollwire.client.results import InvalidResultError, text_drawing
from rollwire.rpc.limits import MAX_CHUNK_BYTES
from rollwire.v1 import environment_pb2 as pb


def draw(environment: Any, render_format: pb.RenderFormat.ValueType) -> pb.RenderResponse:
    """Lets an environment draw its present state.

    Args:
        environment: Has `render_text` or `render_rgb`, whichever the format needs.
        render_format: RENDER_FORMAT_TEXT or RENDER_FORMAT_PNG.

    Raises:
        InvalidResultError: The drawing is outside the contract.
    """
    if render_format == pb.RENDER_FORMAT_TEXT:
        return pb.RenderResponse(text=text_drawing(environment.render_text()))
    try:
        png = encode_png(environment.render_rgb())
    except ValueError as error:
        raise InvalidResultError(str(error)) from error
    if len(png) > MAX_CHUNK_BYTES:
        raise InvalidResultError(f"the picture has {len(png)} bytes as PNG; allowed: at most {MAX_CHUNK_BYTES}")
    return pb.RenderResponse(png=png)
