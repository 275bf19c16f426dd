"""Limits and timings that both ends of a connection must agree on. Nothing is unlimited."""

from __future__ import annotations

import json
from typing import Final

MIB: Final = 1 << 20

ENVIRONMENT_MESSAGE_BYTES: Final = 4 * MIB
"""Largest message on the environment port, which outsiders reach."""

MAX_REPLY_BYTES: Final = ENVIRONMENT_MESSAGE_BYTES - (4 << 10)
"""Largest answer of one session, which has to fit into a message with what a stream adds to it."""

INTERNAL_MESSAGE_BYTES: Final = 8 * MIB
"""Largest message between Rollwire's own services."""

CHUNK_BYTES: Final = 1 * MIB
"""Payload of one chunk of a bulk stream. The contract allows up to twice this."""

MAX_CHUNK_BYTES: Final = 2 * MIB
"""Largest chunk payload that a receiver accepts."""

MAX_UNANSWERED_CALLS: Final = 4096
"""Calls of one `Play` stream that may wait for their replies."""

MAX_CONCURRENT_RPCS: Final = 1024
"""Calls that one server executes at once; more answer RESOURCE_EXHAUSTED."""

MAX_CONCURRENT_STREAMS: Final = 1024
"""HTTP/2 streams per connection."""

KEEPALIVE_TIME_S: Final = 30
"""A client pings after this long without activity."""

KEEPALIVE_TIMEOUT_S: Final = 10
"""A peer that leaves a ping unanswered for this long is lost."""

KEEPALIVE_MIN_INTERVAL_S: Final = 10
"""A server tolerates pings at least this far apart; must be below KEEPALIVE_TIME_S."""

DRAIN_GRACE_S: Final = 30.0
"""Time that running calls get to finish after a server was asked to stop."""

_RETRY_POLICY: Final = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
# Methods that are safe to run twice: read-only, or idempotent by a key in the request. Client streams are not
# listed: gRPC buffers what it may have to send again, and a training batch is too large for that.
RETRYABLE_METHODS: Final = {
    "rollwire.v1.EnvironmentService": (
        "ListEnvironments",
        "OpenSession",
        "Step",
        "RenewSession",
        "Render",
        "CloseSession",
    ),
    "rollwire.v1.RolloutService": (
        "GetInfo",
        "UpdateWeights",
        "OpenPolicySession",
        "ClosePolicySession",
        "ListPolicySessions",
    ),
    "rollwire.v1.LearnerService": ("GetInfo", "Export"),
    "rollwire.v1.CoordinatorService": (
        "GetStatus",
        "Stop",
        "OpenAgentSession",
        "CloseAgentSession",
        "GetSubmissionTerms",
    ),
}


def service_config() -> str:
    """Returns gRPC's service configuration (JSON): retries with backoff and a budget, for idempotent methods only."""
    names = [
        {"service": service, "method": method} for service, methods in RETRYABLE_METHODS.items() for method in methods
    ]
    return json.dumps(
        {
            "methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}],
            "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
        }
    )


def channel_options(message_bytes: int) -> list[tuple[str, int | str]]:
    """Returns the options of every client channel.

    Args:
        message_bytes: Largest message sent or received, in bytes.
    """
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 1),
        # A target that was down is tried again at this pace: services restart within seconds, not minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5000),
        ("grpc.service_config", service_config()),
    ]


def server_options(message_bytes: int) -> list[tuple[str, int]]:
    """Returns the options of every server.

    Args:
        message_bytes: Largest message sent or received, in bytes.
    """
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MIN_INTERVAL_S * 1000),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two servers on one port would share its connections at random.
        ("grpc.so_reuseport", 0),
    ]
