"""Reads and checks the requests about policy sessions: every field as the contract states it. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from rollwire.rollout.engine import Sampling
from rollwire.rollout.requests import Limits, read_sampling
from rollwire.rpc.errors import invalid_field
from rollwire.rpc.ids import METRIC_PATTERN, REQUEST_ID_PATTERN, is_name, is_tag
from rollwire.v1 import rollout_pb2

MAX_CALLS: Final = 1024
MIN_LEASE_S: Final = 1.0
MAX_LEASE_S: Final = 3600.0
DEFAULT_LEASE_S: Final = 600.0
MAX_METRICS: Final = 256
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True)
class SessionPlan:
    """A session to open, all defaults resolved.

    Attributes:
        run_id: Run whose coordinator opened it.
        session_id: Identifier.
        key_digest: SHA-256 of the bearer key, 32 bytes.
        sampling: How tokens are drawn; `max_tokens` is the most of one call.
        sampling_seed: Calls derive theirs from it.
        max_sequence_tokens: Most tokens of one call, prompt and response together.
        max_calls: Most calls.
        lease_s: The session ends when no call came for so long.
        group_id: Copied into the record.
        episode_index: Copied into the record.
        attempt: Copied into the record.
        environment_tag: Copied into the record.
        environment_seed: Copied into the record.
    """

    run_id: str
    session_id: str
    key_digest: bytes
    sampling: Sampling
    sampling_seed: int
    max_sequence_tokens: int
    max_calls: int
    lease_s: float
    group_id: str
    episode_index: int
    attempt: int
    environment_tag: str
    environment_seed: int


def read_open(request: rollout_pb2.OpenPolicySessionRequest, limits: Limits) -> SessionPlan:
    """Returns the session that a request asks for. Raises `RollwireError`, INVALID_ARGUMENT with the field's path."""
    check_session_id(request.session_id)
    if len(request.key_digest) != _DIGEST_BYTES:
        raise invalid_field("key_digest", f"{len(request.key_digest)} bytes", "a SHA-256 digest, 32 bytes")
    longest = limits.max_sequence_tokens
    tokens = request.max_sequence_tokens or longest
    if not 2 <= tokens <= longest:
        raise invalid_field(
            "max_sequence_tokens",
            request.max_sequence_tokens,
            f"0 (the limit of this server, {longest}) or 2 to {longest}",
        )
    if not 1 <= request.max_calls <= MAX_CALLS:
        raise invalid_field("max_calls", request.max_calls, f"1 to {MAX_CALLS}")
    if not is_name(request.group_id):
        raise invalid_field("group_id", request.group_id, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")
    if not is_tag(request.environment_tag):
        raise invalid_field("environment_tag", request.environment_tag, "[A-Za-z0-9][A-Za-z0-9_.-]{0,62} without '..'")
    return SessionPlan(
        run_id=request.fence.run_id,
        session_id=request.session_id,
        key_digest=request.key_digest,
        sampling=read_sampling(request.sampling, limits),
        sampling_seed=request.sampling_seed,
        max_sequence_tokens=tokens,
        max_calls=request.max_calls,
        lease_s=_lease_s(request),
        group_id=request.group_id,
        episode_index=request.episode_index,
        attempt=request.attempt,
        environment_tag=request.environment_tag,
        environment_seed=request.environment_seed,
    )


def check_session_id(session_id: str) -> None:
    """Checks the form of an identifier. Raises `RollwireError`, INVALID_ARGUMENT."""
    if not REQUEST_ID_PATTERN.fullmatch(session_id):
        raise invalid_field("session_id", session_id, "1 to 64 printable ASCII characters without blanks")


def check_close(request: rollout_pb2.ClosePolicySessionRequest, completed: Collection[str]) -> None:
    """Checks rewards and metrics.

    Args:
        request: What was asked.
        completed: Identifiers of the calls that completed.

    Raises:
        RollwireError: INVALID_ARGUMENT with the path of the offending field.
    """
    if not math.isfinite(request.reward):
        raise invalid_field("reward", request.reward, "a finite number")
    _check_numbers("call_rewards", request.call_rewards)
    for call_id in request.call_rewards:
        if call_id not in completed:
            raise invalid_field(
                f"call_rewards[{call_id!r}]", call_id, "the id of a completed call of this session, as the edge gave it"
            )
    if len(request.metrics) > MAX_METRICS:
        raise invalid_field("metrics", f"{len(request.metrics)} entries", f"at most {MAX_METRICS} entries")
    for name in request.metrics:
        if not METRIC_PATTERN.fullmatch(name):
            raise invalid_field("metrics", name, "names of the form [A-Za-z0-9_./-]{1,128}")
    _check_numbers("metrics", request.metrics)


def _check_numbers(path: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise invalid_field(f"{path}[{name!r}]", value, "a finite number")


def _lease_s(request: rollout_pb2.OpenPolicySessionRequest) -> float:
    if not request.HasField("lease"):
        return DEFAULT_LEASE_S
    seconds = request.lease.seconds + request.lease.nanos / 1e9
    if not MIN_LEASE_S <= seconds <= MAX_LEASE_S:
        raise invalid_field("lease", f"{seconds:g} s", f"{MIN_LEASE_S:g} s to {MAX_LEASE_S:g} s")
    return seconds
