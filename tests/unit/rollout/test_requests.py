"""Every field of a request as the contract states it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.rollout.engine import Sampling
from rollwire.rollout.engines.vllm_requests import LOWEST_TEMPERATURE
from rollwire.rollout.requests import (
    Limits,
    check_prompt,
    check_target,
    check_version,
    read_group,
    read_sampling,
    write_sampling,
)
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

LIMITS = Limits(
    vocabulary_size=100, max_sequence_tokens=64, end_token_ids=frozenset({2, 7}), environment_targets=("h:1",)
)
Request = rollout_pb2.RunGroupRequest


def group() -> Request:
    return Request(
        group_id="g1", environment_tag="Lake", episodes=4, sampling=trajectory_pb2.SamplingSettings(max_tokens=8)
    )


def test_defaults_are_resolved() -> None:
    plan = read_group(group(), LIMITS)
    assert plan.indices == (0, 1, 2, 3)
    assert plan.max_episode_tokens == 64
    assert plan.episode_timeout_s is None
    assert plan.targets == ("h:1",)
    assert plan.sampling == Sampling(1.0, 1.0, 0, 8, frozenset({2, 7}), trajectory_pb2.LOGPROB_MODE_SAMPLED)
    assert write_sampling(plan.sampling) == trajectory_pb2.SamplingSettings(
        temperature=1, top_p=1, max_tokens=8, stop_token_ids=[2, 7], logprob_mode=trajectory_pb2.LOGPROB_MODE_SAMPLED
    )


def test_what_is_given_is_kept() -> None:
    request = group()
    request.episode_indices.extend([3, 1])
    request.environment_targets.extend(["a:1", "b:2", "a:1"])
    request.max_episode_tokens = 32
    request.episode_timeout.FromMilliseconds(1500)
    request.sampling.temperature = 0
    request.sampling.stop_token_ids.append(5)
    plan = read_group(request, LIMITS)
    assert plan.indices == (1, 3) and plan.targets == ("a:1", "b:2") and plan.max_episode_tokens == 32
    assert plan.episode_timeout_s == 1.5
    assert plan.sampling.temperature == 0 and plan.sampling.stop_token_ids == {5}


BAD: list[tuple[str, Callable[[Request], object]]] = [
    ("group_id", lambda r: setattr(r, "group_id", "../x")),
    ("group_id", lambda r: setattr(r, "group_id", "")),
    ("environment_tag", lambda r: setattr(r, "environment_tag", "a b")),
    ("episodes", lambda r: setattr(r, "episodes", 0)),
    ("episodes", lambda r: setattr(r, "episodes", 1025)),
    ("environment_options", lambda r: r.environment_options.update({"x": "y" * 70_000})),
    ("max_episode_tokens", lambda r: setattr(r, "max_episode_tokens", 65)),
    ("max_episode_tokens", lambda r: setattr(r, "max_episode_tokens", 1)),
    ("episode_timeout", lambda r: r.episode_timeout.CopyFrom(Duration(seconds=0))),
    ("episode_timeout", lambda r: r.episode_timeout.CopyFrom(Duration(seconds=-1))),
    ("episode_timeout", lambda r: r.episode_timeout.CopyFrom(Duration(seconds=10**9))),
    ("episode_indices", lambda r: r.episode_indices.append(4)),
    ("episode_indices", lambda r: r.episode_indices.extend([1, 1])),
    ("environment_targets[1]", lambda r: r.environment_targets.extend(["a:1", "nonsense"])),
    ("environment_targets", lambda r: r.environment_targets.extend([f"a:{port}" for port in range(1, 66)])),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", -0.1)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", 100.5)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", float("nan"))),
    ("sampling.top_p", lambda r: setattr(r.sampling, "top_p", 0)),
    ("sampling.top_p", lambda r: setattr(r.sampling, "top_p", 1.5)),
    ("sampling.top_p", lambda r: setattr(r.sampling, "top_p", float("nan"))),
    ("sampling.max_tokens", lambda r: setattr(r.sampling, "max_tokens", 0)),
    ("sampling.stop_token_ids", lambda r: r.sampling.stop_token_ids.extend(range(65))),
    ("sampling.stop_token_ids[1]", lambda r: r.sampling.stop_token_ids.extend([1, 100])),
    ("sampling.logprob_mode", lambda r: setattr(r.sampling, "logprob_mode", 9)),
]


@pytest.mark.parametrize(("field", "spoil"), BAD)
def test_fields_outside_their_range_are_named(field: str, spoil: Callable[[Request], object]) -> None:
    request = group()
    spoil(request)
    with pytest.raises(RollwireError) as caught:
        read_group(request, LIMITS)
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason == Reason.INVALID_FIELD
    assert list(caught.value.fields) == [field]


def test_without_any_environment_server_the_request_must_name_one() -> None:
    with pytest.raises(RollwireError, match=r"services\.environment is empty"):
        read_group(group(), Limits(100, 64, frozenset(), ()))


def test_prompts() -> None:
    check_prompt([0, 99], LIMITS)
    check_prompt([1] * 63, LIMITS)
    for tokens, reason in (([], Reason.INVALID_FIELD), ([1, 100], Reason.INVALID_FIELD), ([-1], Reason.INVALID_FIELD)):
        with pytest.raises(RollwireError) as caught:
            check_prompt(tokens, LIMITS)
        assert caught.value.reason == reason
    with pytest.raises(RollwireError) as caught:
        check_prompt([1] * 64, LIMITS)
    assert caught.value.reason == Reason.PROMPT_TOO_LONG and caught.value.metadata == {"tokens": "64", "limit": "63"}


@pytest.mark.parametrize(
    "target",
    ["", "host", ":1", "host:", "host:0", "host:70000", "host:x", "h" * 400 + ":1", "h:" + "1" * 5000],
)
def test_targets(target: str) -> None:
    check_target("source.target", "127.0.0.1:80")
    with pytest.raises(RollwireError, match="host:port"):
        check_target("source.target", target)


def test_versions_need_a_lineage() -> None:
    check_version("version", weights_pb2.WeightVersion(lineage="main", step=0))
    with pytest.raises(RollwireError) as caught:
        check_version("version", weights_pb2.WeightVersion(step=3))
    assert list(caught.value.fields) == ["version.lineage"]


def test_an_engine_may_have_a_lowest_temperature() -> None:
    limits = replace(LIMITS, lowest_temperature=LOWEST_TEMPERATURE)
    for temperature in (0.0, 0.01, 100.0):
        read_sampling(trajectory_pb2.SamplingSettings(max_tokens=1, temperature=temperature), limits)
    for temperature in (0.0099, 1e-30, -0.01, math.nan):
        with pytest.raises(RollwireError, match=r"0 \(greedy\) or 0\.01 to 100") as caught:
            read_sampling(trajectory_pb2.SamplingSettings(max_tokens=1, temperature=temperature), limits)
        assert list(caught.value.fields) == ["sampling.temperature"]


def test_settings_alone() -> None:
    settings = trajectory_pb2.SamplingSettings(
        max_tokens=1, top_k=2**32 - 1, logprob_mode=trajectory_pb2.LOGPROB_MODE_RAW
    )
    found = read_sampling(settings, LIMITS)
    assert found.top_k == 2**32 - 1 and found.logprob_mode == trajectory_pb2.LOGPROB_MODE_RAW
