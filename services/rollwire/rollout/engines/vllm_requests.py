"""Translation between Rollwire's generations and vLLM's requests and outputs. Pure: imports no vLLM."""

from __future__ import annotations

import math
import struct
from typing import Any, Final

from rollwire.rollout.engine import GenerationError, GenerationRequest, Sampling
from rollwire.v1 import trajectory_pb2

# vLLM silently raises lower temperatures to this, and would report probabilities of another distribution.
_VLLM_LOWEST_TEMPERATURE: Final = 0.01
LOWEST_TEMPERATURE: Final = struct.unpack("<f", struct.pack("<f", _VLLM_LOWEST_TEMPERATURE))[0]
"""The lowest temperature above 0, as it travels: 0.01 in float32, which is a little less."""
_SEED_BITS: Final = 63


def sampling_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's `SamplingParams`.

    Raises:
        GenerationError: vLLM cannot sample like that.
    """
    sampling = request.sampling
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise GenerationError(
            f"sampling.temperature is {sampling.temperature}; the vllm engine takes 0 or at least "
            f"{_VLLM_LOWEST_TEMPERATURE}"
        )
    room = request.length_limit_tokens - len(request.token_ids)
    return {
        "temperature": max(sampling.temperature, _VLLM_LOWEST_TEMPERATURE) if sampling.temperature else 0.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": min(sampling.max_tokens, room),
        # The log-probability of the drawn token and of no other.
        "logprobs": 0,
        "flat_logprobs": True,
        # -1 would mean no seed at all.
        "seed": request.seed % (1 << _SEED_BITS),
        "stop_token_ids": sorted(sampling.stop_token_ids),
        # The model's own end token stops only if the request says so.
        "ignore_eos": True,
        "detokenize": False,
    }


def needs_scoring(sampling: Sampling) -> bool:
    """Tells whether raw log-probabilities are wanted and differ from those of the distribution sampled from.

    vLLM has one log-probability mode per engine, so these take another pass over the tokens. A greedy token's are raw.
    """
    return (
        sampling.logprob_mode == trajectory_pb2.LOGPROB_MODE_RAW
        and sampling.temperature != 0
        and not (sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0)
    )


def drawn_logprobs(sampling: Sampling, output: Any) -> list[float]:
    """Returns the log-probability of each token of a `CompletionOutput`.

    A greedy token was drawn from a point mass: its log-probability under LOGPROB_MODE_SAMPLED is 0.

    Raises:
        GenerationError: One of them is not finite: the model computed NaN.
    """
    if not output.token_ids:
        # An aborted stream's last piece: there vLLM repeats log-probabilities that it has delivered.
        return []
    logprobs = [float(value) for value in output.logprobs.logprobs]
    if len(logprobs) != len(output.token_ids):
        raise GenerationError(f"vllm gave {len(logprobs)} log-probabilities for {len(output.token_ids)} tokens")
    if not all(map(math.isfinite, logprobs)):
        raise GenerationError("a log-probability is not finite: the model's logits are NaN or infinite")
    if sampling.temperature == 0 and sampling.logprob_mode != trajectory_pb2.LOGPROB_MODE_RAW:
        return [0.0] * len(logprobs)
    return logprobs


def stop_reason(
    request: GenerationRequest, token_ids: list[int], finish_reason: str | None
) -> trajectory_pb2.StopReason.ValueType:
    """Returns why a generation ended.

    Decided by the tokens, since versions of vLLM differ in what they report when two reasons hold.

    Args:
        request: What was asked for.
        token_ids: All tokens drawn.
        finish_reason: vLLM's reason.

    Raises:
        GenerationError: It ended for none of the reasons that the contract has.
    """
    if token_ids and token_ids[-1] in request.sampling.stop_token_ids:
        return trajectory_pb2.STOP_REASON_STOP_TOKEN
    if finish_reason == "abort":
        return trajectory_pb2.STOP_REASON_ABORTED
    if len(request.token_ids) + len(token_ids) >= request.length_limit_tokens:
        return trajectory_pb2.STOP_REASON_LENGTH_LIMIT
    if len(token_ids) >= request.sampling.max_tokens:
        return trajectory_pb2.STOP_REASON_MAX_TOKENS
    raise GenerationError(f"vllm ended a generation after {len(token_ids)} tokens with reason {finish_reason!r}")
