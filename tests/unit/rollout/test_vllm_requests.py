"""Translation between Rollwire's generations and vLLM's, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollwire.rollout.continuation import continuation
from rollwire.rollout.engine import GenerationError, GenerationRequest, Sampling
from rollwire.rollout.engines.vllm_requests import drawn_logprobs, needs_scoring, sampling_arguments, stop_reason
from rollwire.v1 import trajectory_pb2

RAW = trajectory_pb2.LOGPROB_MODE_RAW
STOP, LENGTH, TOKENS, ABORTED = (
    trajectory_pb2.STOP_REASON_STOP_TOKEN,
    trajectory_pb2.STOP_REASON_LENGTH_LIMIT,
    trajectory_pb2.STOP_REASON_MAX_TOKENS,
    trajectory_pb2.STOP_REASON_ABORTED,
)


def sampling(**changes: Any) -> Sampling:
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 4,
        "stop_token_ids": frozenset({9, 2}),
        "logprob_mode": trajectory_pb2.LOGPROB_MODE_SAMPLED,
    }
    return Sampling(**{**settings, **changes})


def request(seed: int = 1, limit: int = 100, **changes: Any) -> GenerationRequest:
    return GenerationRequest([1, 2, 3], sampling(**changes), seed, limit)


def test_sampling_arguments() -> None:
    arguments = sampling_arguments(request(limit=5, temperature=0.5))
    assert arguments["max_tokens"] == 2, "the sequence may only reach its limit"
    assert arguments["stop_token_ids"] == [2, 9]
    assert arguments["ignore_eos"] is True
    assert arguments["temperature"] == 0.5
    assert sampling_arguments(request())["max_tokens"] == 4


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_every_seed_is_one_that_vllm_uses(seed: int) -> None:
    assert 0 <= sampling_arguments(request(seed))["seed"] < 1 << 63


def test_the_lowest_temperature_is_accepted_as_it_travels() -> None:
    travelled = trajectory_pb2.SamplingSettings(temperature=0.01).temperature
    assert travelled < 0.01 and sampling_arguments(request(temperature=travelled))["temperature"] == 0.01


@pytest.mark.parametrize("temperature", [1e-6, 0.009])
def test_temperatures_that_vllm_would_change_are_refused(temperature: float) -> None:
    with pytest.raises(GenerationError, match=r"takes 0 or at least 0\.01"):
        sampling_arguments(request(temperature=temperature))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"temperature": 0.5}, False),
        ({"logprob_mode": RAW}, False),
        ({"logprob_mode": RAW, "temperature": 0.0, "top_k": 5}, False),
        ({"logprob_mode": RAW, "temperature": 0.5}, True),
        ({"logprob_mode": RAW, "top_p": 0.9}, True),
        ({"logprob_mode": RAW, "top_k": 1}, True),
    ],
)
def test_raw_logprobs_take_another_pass_only_where_they_differ(changes: dict[str, Any], expected: bool) -> None:
    assert needs_scoring(sampling(**changes)) is expected


def output(token_ids: list[int], logprobs: list[float]) -> Any:
    return SimpleNamespace(token_ids=token_ids, logprobs=SimpleNamespace(logprobs=logprobs))


def test_logprobs_of_drawn_tokens() -> None:
    assert drawn_logprobs(sampling(), output([5, 6], [-0.5, -1.5])) == [-0.5, -1.5]
    assert drawn_logprobs(sampling(temperature=0.0), output([5, 6], [-0.5, -1.5])) == [0.0, 0.0]
    assert drawn_logprobs(sampling(temperature=0.0, logprob_mode=RAW), output([5], [-0.5])) == [-0.5]
    assert drawn_logprobs(sampling(), output([], [-0.5])) == []
    for value in (float("nan"), float("-inf")):
        with pytest.raises(GenerationError, match="not finite"):
            drawn_logprobs(sampling(), output([5], [value]))
    with pytest.raises(GenerationError, match="1 log-probabilities for 2 tokens"):
        drawn_logprobs(sampling(), output([5, 6], [-0.5]))


@pytest.mark.parametrize(
    ("limit", "token_ids", "finish_reason", "expected"),
    [
        (100, [5, 9], "stop", STOP),
        (100, [5, 5, 5, 9], "length", STOP),
        (5, [5, 9], "length", STOP),
        (100, [5, 5, 5, 5], "length", TOKENS),
        (5, [5, 5], "length", LENGTH),
        (7, [5, 5, 5, 5], "length", LENGTH),
        (100, [], "abort", ABORTED),
        (100, [5], "abort", ABORTED),
        (100, [5, 9], "abort", STOP),
    ],
)
def test_stop_reasons(limit: int, token_ids: list[int], finish_reason: str, expected: int) -> None:
    assert stop_reason(request(limit=limit), token_ids, finish_reason) == expected


@pytest.mark.parametrize("finish_reason", ["error", "repetition", None, "length", "stop"])
def test_an_end_without_a_reason_is_a_fault(finish_reason: str | None) -> None:
    with pytest.raises(GenerationError, match="after 1 tokens with reason"):
        stop_reason(request(), [5], finish_reason)


def test_the_rest_of_an_aborted_generation() -> None:
    first = request(limit=9)
    assert continuation(first, []) is first
    rest = continuation(first, [7, 8])
    assert rest.token_ids == [1, 2, 3, 7, 8]
    assert rest.sampling.max_tokens == 2
    assert rest.length_limit_tokens == 9
    assert len({first.seed, rest.seed, continuation(first, [7]).seed}) == 3
    assert continuation(first, [7, 8]).seed == rest.seed
