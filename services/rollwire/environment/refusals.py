"""Refusals that hosts of every kind give in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from rollwire.environment.options import OptionError
from rollwire.rpc.errors import Reason, RollwireError, invalid_field, precondition
from rollwire.v1 import environment_pb2 as pb


def bad_option(error: OptionError) -> RollwireError:
    """An option that the environment does not take."""
    return invalid_field(f"options.{error.name}", error.value, error.allowed)


def refused_options(options: Mapping[str, Any], reason: str) -> RollwireError:
    """The constructor refuses options of the request, together or one of them."""
    message = f"the environment refuses the options: {reason}; they were {dict(options)!r:.200}"
    return RollwireError(
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_FIELD,
        message,
        metadata={"field": "options"},
        fields={"options": message},
    )


def check_drawable(description: pb.EnvironmentDescription, render_format: pb.RenderFormat.ValueType) -> None:
    """Raises `RollwireError` when an environment cannot draw itself in a format."""
    if render_format not in description.render_formats:
        raise precondition(
            Reason.RENDER_UNSUPPORTED,
            f"environment {description.tag} cannot draw {pb.RenderFormat.Name(render_format)}; it offers: "
            f"{', '.join(map(pb.RenderFormat.Name, description.render_formats)) or 'nothing'}",
            environment_tag=description.tag,
        )


def failed_drawing(tag: str, reason: str) -> RollwireError:
    """The environment failed to draw itself."""
    return precondition(
        Reason.RENDER_UNSUPPORTED, f"environment {tag} failed to draw itself: {reason}", environment_tag=tag
    )
