"""Going on with a generation that had to make way: the `keep` mode of an update or a pause. Pure.

Engines abort what runs and return what was drawn; the rest is a request of its own, drawn by the new version from keys
and values that this version computes. Each piece names the version that drew it, so no token is attributed to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollwire.rollout.engine import GenerationRequest
from rollwire.rollout.seeds import derive_seed
from rollwire.v1 import trajectory_pb2


def continuation(request: GenerationRequest, drawn: Sequence[int]) -> GenerationRequest:
    """Returns the request for what is missing of an aborted generation.

    Args:
        request: The request of the generation.
        drawn: Tokens that it drew before it was aborted; fewer than `max_tokens`, none of them a stop token.
    """
    assert len(drawn) < request.sampling.max_tokens
    if not drawn:
        return request
    return replace(
        request,
        token_ids=[*request.token_ids, *drawn],
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(drawn)),
        # The first seed's draws would be repeated from the beginning.
        seed=derive_seed(request.seed, len(drawn)),
    )


def reason_to_stop(request: GenerationRequest, drawn: Sequence[int]) -> trajectory_pb2.StopReason.ValueType:
    """Returns why an aborted generation needs no continuation; STOP_REASON_UNSPECIFIED if it needs one.

    Args:
        request: The request of the generation.
        drawn: Tokens that it drew before it was aborted.
    """
    if drawn and drawn[-1] in request.sampling.stop_token_ids:
        return trajectory_pb2.STOP_REASON_STOP_TOKEN
    if len(request.token_ids) + len(drawn) >= request.length_limit_tokens:
        return trajectory_pb2.STOP_REASON_LENGTH_LIMIT
    if len(drawn) >= request.sampling.max_tokens:
        return trajectory_pb2.STOP_REASON_MAX_TOKENS
    return trajectory_pb2.STOP_REASON_UNSPECIFIED
