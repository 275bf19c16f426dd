"""Reads and checks requests: every field as the contract states it, all defaults resolved. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from rollwire.rollout.engine import Sampling
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import is_name, is_tag
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

MAX_EPISODES: Final = 1024
MAX_TARGETS: Final = 64
MAX_STOP_TOKENS: Final = 64
MAX_CACHE_KEY: Final = 64
MAX_TEMPERATURE: Final = 100.0
MAX_EPISODE_TIMEOUT_S: Final = 86_400.0
MAX_OPTIONS_BYTES: Final = 65_536
DEFAULT_PAUSE_S: Final = 60.0
MAX_PAUSE_S: Final = 3600.0
_NAME: Final = "[a-z0-9][a-z0-9_.-]{0,62} without '..'"


@dataclass(frozen=True)
class Limits:
    """What the server can do.

    Attributes:
        vocabulary_size: Valid token ids are 0 to this minus 1.
        max_sequence_tokens: Longest sequence.
        end_token_ids: Tokens that end a generation unless the request names others.
        environment_targets: Environment servers played on unless the request names others.
        lowest_temperature: The engine cannot sample at a lower one, except 0.
    """

    vocabulary_size: int
    max_sequence_tokens: int
    end_token_ids: frozenset[int]
    environment_targets: tuple[str, ...]
    lowest_temperature: float = 0.0


@dataclass(frozen=True)
class GroupPlan:
    """A group of episodes to play.

    Attributes:
        group_id: The group.
        environment_tag: What is played.
        environment_seed: Seed of the environment.
        environment_options: Options of the environment.
        indices: Which episodes, ascending.
        attempt: Copied into every result.
        sampling: How tokens are drawn; `max_tokens` counts per turn.
        sampling_seed: Episodes derive theirs from it.
        max_episode_tokens: Most tokens of an episode.
        episode_timeout_s: Wall-clock limit of an episode; None for none.
        targets: Environment servers to play on, at least one.
    """

    group_id: str
    environment_tag: str
    environment_seed: int
    environment_options: Struct
    indices: tuple[int, ...]
    attempt: int
    sampling: Sampling
    sampling_seed: int
    max_episode_tokens: int
    episode_timeout_s: float | None
    targets: tuple[str, ...]


def read_group(request: rollout_pb2.RunGroupRequest, limits: Limits) -> GroupPlan:
    """Returns the plan that a request asks for.

    Raises:
        RollwireError: INVALID_ARGUMENT with the path of the offending field.
    """
    if not is_name(request.group_id):
        raise invalid_field("group_id", request.group_id, _NAME)
    if not is_tag(request.environment_tag):
        raise invalid_field("environment_tag", request.environment_tag, "[A-Za-z0-9][A-Za-z0-9_.-]{0,62} without '..'")
    if not 1 <= request.episodes <= MAX_EPISODES:
        raise invalid_field("episodes", request.episodes, f"1 to {MAX_EPISODES}")
    if request.environment_options.ByteSize() > MAX_OPTIONS_BYTES:
        raise invalid_field(
            "environment_options",
            f"{request.environment_options.ByteSize()} bytes",
            f"at most {MAX_OPTIONS_BYTES} bytes",
        )
    longest = limits.max_sequence_tokens
    tokens = request.max_episode_tokens or longest
    if not 2 <= tokens <= longest:
        raise invalid_field(
            "max_episode_tokens",
            request.max_episode_tokens,
            f"0 (the limit of this server, {longest}) or 2 to {longest}",
        )
    timeout_s = None
    if request.HasField("episode_timeout"):
        timeout_s = _seconds(request.episode_timeout, "episode_timeout", MAX_EPISODE_TIMEOUT_S)
    return GroupPlan(
        group_id=request.group_id,
        environment_tag=request.environment_tag,
        environment_seed=request.environment_seed,
        environment_options=request.environment_options,
        indices=_indices(request),
        attempt=request.attempt,
        sampling=read_sampling(request.sampling, limits),
        sampling_seed=request.sampling_seed,
        max_episode_tokens=tokens,
        episode_timeout_s=timeout_s,
        targets=_targets(request.environment_targets, limits.environment_targets),
    )


def read_sampling(settings: trajectory_pb2.SamplingSettings, limits: Limits) -> Sampling:
    """Returns sampling settings with all defaults resolved.

    Raises:
        RollwireError: INVALID_ARGUMENT with the path of the offending field.
    """
    temperature = settings.temperature if settings.HasField("temperature") else 1.0
    lowest = limits.lowest_temperature
    if not (temperature == 0 or lowest <= temperature <= MAX_TEMPERATURE):
        above = f"or {lowest:g} " if lowest else ""
        raise invalid_field("sampling.temperature", temperature, f"0 (greedy) {above}to {MAX_TEMPERATURE:g}")
    top_p = settings.top_p if settings.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise invalid_field("sampling.top_p", top_p, "a number in (0, 1]; 1 is off")
    if settings.max_tokens < 1:
        raise invalid_field("sampling.max_tokens", settings.max_tokens, "a number >= 1")
    if len(settings.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid_field(
            "sampling.stop_token_ids", f"{len(settings.stop_token_ids)} entries", f"at most {MAX_STOP_TOKENS} entries"
        )
    check_tokens("sampling.stop_token_ids", settings.stop_token_ids, limits.vocabulary_size)
    mode = settings.logprob_mode or trajectory_pb2.LOGPROB_MODE_SAMPLED
    if mode not in (trajectory_pb2.LOGPROB_MODE_SAMPLED, trajectory_pb2.LOGPROB_MODE_RAW):
        raise invalid_field("sampling.logprob_mode", mode, "LOGPROB_MODE_SAMPLED or LOGPROB_MODE_RAW")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=settings.top_k,
        max_tokens=settings.max_tokens,
        stop_token_ids=frozenset(settings.stop_token_ids) or limits.end_token_ids,
        logprob_mode=mode,
    )


def read_pause_mode(path: str, mode: rollout_pb2.PauseMode.ValueType) -> rollout_pb2.PauseMode.ValueType:
    """Returns the mode that was asked for, PAUSE_MODE_WAIT by default. Raises `RollwireError`, INVALID_ARGUMENT."""
    if mode not in rollout_pb2.PauseMode.values():
        raise invalid_field(path, mode, "PAUSE_MODE_WAIT, PAUSE_MODE_ABORT or PAUSE_MODE_KEEP")
    return mode or rollout_pb2.PAUSE_MODE_WAIT


def read_sleep_level(request: rollout_pb2.SleepRequest) -> rollout_pb2.SleepLevel.ValueType:
    """Returns the level asked for, SLEEP_LEVEL_HOST by default. Raises `RollwireError`, INVALID_ARGUMENT."""
    if request.level not in rollout_pb2.SleepLevel.values():
        raise invalid_field("level", request.level, "SLEEP_LEVEL_HOST or SLEEP_LEVEL_DISCARD")
    return request.level or rollout_pb2.SLEEP_LEVEL_HOST


def read_lease_s(request: rollout_pb2.PauseRequest) -> float:
    """Returns the length of a pause in seconds. Raises `RollwireError`, INVALID_ARGUMENT."""
    return _seconds(request.lease, "lease", MAX_PAUSE_S) if request.HasField("lease") else DEFAULT_PAUSE_S


def write_sampling(sampling: Sampling) -> trajectory_pb2.SamplingSettings:
    """Returns resolved settings as they are recorded."""
    return trajectory_pb2.SamplingSettings(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        logprob_mode=sampling.logprob_mode,
    )


def check_prompt(token_ids: Sequence[int], limits: Limits) -> None:
    """Checks the prompt of `Generate`.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD` or `PROMPT_TOO_LONG`.
    """
    if not token_ids:
        raise invalid_field("token_ids", [], "at least one token id")
    if len(token_ids) >= limits.max_sequence_tokens:
        message = (
            f"token_ids holds {len(token_ids)} tokens; allowed: at most {limits.max_sequence_tokens - 1}, so that the "
            f"sequence has room for one more; raise rollout.max_episode_tokens on the server or shorten the prompt"
        )
        raise RollwireError(
            grpc.StatusCode.INVALID_ARGUMENT,
            Reason.PROMPT_TOO_LONG,
            message,
            metadata={"tokens": str(len(token_ids)), "limit": str(limits.max_sequence_tokens - 1)},
            fields={"token_ids": message},
        )
    check_tokens("token_ids", token_ids, limits.vocabulary_size)


def check_tokens(path: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    """Checks that token ids are within the vocabulary. Raises `RollwireError`, INVALID_ARGUMENT."""
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocabulary_size:
            raise invalid_field(f"{path}[{position}]", token, f"a token id, 0 to {vocabulary_size - 1}")


def check_version(path: str, version: weights_pb2.WeightVersion) -> None:
    """Checks that a version is set. Raises `RollwireError`, INVALID_ARGUMENT."""
    if not is_name(version.lineage):
        raise invalid_field(f"{path}.lineage", version.lineage, _NAME)


def check_target(path: str, target: str) -> None:
    """Checks that a target is `host:port`. Raises `RollwireError`, INVALID_ARGUMENT."""
    host, colon, port = target.rpartition(":")
    if len(target) > 300 or not (host and colon and port.isdecimal() and 0 < int(port) < 65_536):
        raise invalid_field(path, target, "host:port")


def _indices(request: rollout_pb2.RunGroupRequest) -> tuple[int, ...]:
    indices = sorted(request.episode_indices) or list(range(request.episodes))
    if len(set(indices)) != len(indices):
        raise invalid_field("episode_indices", indices, "every index at most once")
    if indices[-1] >= request.episodes:
        raise invalid_field("episode_indices", indices[-1], f"0 to {request.episodes - 1}, below episodes")
    return tuple(indices)


def _targets(asked: Sequence[str], configured: tuple[str, ...]) -> tuple[str, ...]:
    if len(asked) > MAX_TARGETS:
        raise invalid_field("environment_targets", f"{len(asked)} entries", f"at most {MAX_TARGETS} entries")
    for position, target in enumerate(asked):
        check_target(f"environment_targets[{position}]", target)
    targets = tuple(dict.fromkeys(asked)) or configured
    if not targets:
        raise invalid_field(
            "environment_targets", [], "at least one host:port, because services.environment is empty on this server"
        )
    return targets


def _seconds(duration: Duration, path: str, most_s: float) -> float:
    seconds = duration.seconds + duration.nanos / 1e9
    if not (math.isfinite(seconds) and 0 < seconds <= most_s):
        raise invalid_field(path, f"{seconds:g} s", f"more than 0 and at most {most_s:g} s")
    return seconds
