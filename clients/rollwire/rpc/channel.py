"""The one place where channels are built."""

from __future__ import annotations

import grpc
import grpc.aio

from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, INTERNAL_MESSAGE_BYTES, channel_options


def open_channel(target: str) -> grpc.aio.Channel:
    """Opens a channel to a Rollwire service; connecting happens at the first call.

    Args:
        target: `host:port`.
    """
    return grpc.aio.insecure_channel(target, options=channel_options(INTERNAL_MESSAGE_BYTES))


def open_environment_channel(target: str) -> grpc.aio.Channel:
    """Opens a channel to an environment server, which accepts smaller messages than the other services."""
    return grpc.aio.insecure_channel(target, options=channel_options(ENVIRONMENT_MESSAGE_BYTES))
