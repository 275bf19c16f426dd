"""The gRPC side of the rollout server: checks, fences, and hands over to groups, policy and updater."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from rollwire.rollout.agents.desk import AgentDesk
from rollwire.rollout.agents.plans import check_session_id, read_open
from rollwire.rollout.engine import GenerationError, GenerationRequest
from rollwire.rollout.environments import EnvironmentPool
from rollwire.rollout.episode import Hashes
from rollwire.rollout.groups import EpisodeSlots, GroupRunner
from rollwire.rollout.pause import Pauser
from rollwire.rollout.policy import Policy, no_weights
from rollwire.rollout.requests import (
    MAX_CACHE_KEY,
    GroupPlan,
    Limits,
    check_prompt,
    check_target,
    check_version,
    read_group,
    read_lease_s,
    read_pause_mode,
    read_sampling,
    read_sleep_level,
)
from rollwire.rollout.sleep import Sleeper
from rollwire.rollout.weight_check import WeightChecker
from rollwire.rollout.weights import WeightUpdater
from rollwire.rpc.errors import Reason, RollwireError, exhausted, invalid_field, precondition
from rollwire.rpc.versions import build_version, version_text
from rollwire.serving.fencing import Fencing
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2

_MAX_GENERATE_CALLS: Final = 512
_LOADING_RETRY_S: Final = 1.0
_STATM: Final = Path("/proc/self/statm")


@dataclass(frozen=True)
class Parts:
    """What exists once the model is loaded.

    Attributes:
        policy: What is served.
        updater: Changes its weights.
        pauser: Pauses it.
        checker: Compares what the engine holds with what was loaded.
        sleeper: Frees the device.
        slots: Places for episodes and sessions.
        groups: Plays groups.
        agents: Sessions of agents and where they call; None without an HTTP edge.
        pool: Environment servers.
        limits: What requests may ask for.
        hashes: Tokenizer and templates.
        keep_prefixes: Honour `GenerateRequest.cache_key`.
        settings: What of its configuration the server acts on; see `GetInfo`.
    """

    policy: Policy
    updater: WeightUpdater
    pauser: Pauser
    checker: WeightChecker
    sleeper: Sleeper
    slots: EpisodeSlots
    groups: GroupRunner
    agents: AgentDesk | None
    pool: EnvironmentPool
    limits: Limits
    hashes: Hashes
    keep_prefixes: bool
    settings: dict[str, str]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves `rollwire.v1.RolloutService`.

    Attributes:
        parts: Set once the model is loaded; until then every call is refused.
    """

    def __init__(self) -> None:
        self.parts: Parts | None = None
        self._fencing = Fencing()
        self._generate_calls = 0

    async def GetInfo(
        self, request: rollout_pb2.RolloutServiceGetInfoRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.RolloutServiceGetInfoResponse:
        """See the contract."""
        parts = self.loaded()
        engine = parts.policy.engine
        active = parts.policy.states.active
        description = engine.description
        return rollout_pb2.RolloutServiceGetInfoResponse(
            build_version=build_version(),
            engine=description.name,
            model_architecture=description.architecture,
            tokenizer_hash=parts.hashes.tokenizer,
            template_hash=parts.hashes.templates,
            active_version=active.version if active is not None else None,
            active_digest=active.digest if active is not None else b"",
            max_sequence_tokens=description.max_sequence_tokens,
            max_concurrent_sequences=description.max_concurrent_sequences,
            episode_capacity=parts.slots.capacity,
            running_episodes=parts.slots.taken,
            device=description.device,
            dtype=description.dtype,
            resident_bytes=_resident_bytes(),
            generated_tokens=engine.generated_tokens,
            paused=parts.pauser.paused,
            sleep_level=parts.policy.sleep.level,
            settings=parts.settings,
        )

    async def RunGroup(
        self, request: rollout_pb2.RunGroupRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.RunGroupResponse]:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        plan = read_group(request, parts.limits)
        required = request.required_version if request.HasField("required_version") else None
        if required is not None:
            check_version("required_version", required)
        _require_version(parts.policy, required)
        await _refuse_unknown_tag(parts.pool, plan)
        async with aclosing(parts.groups.play(plan, context.time_remaining())) as results:
            async for result in results:
                yield result

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """See the contract."""
        parts = self.loaded()
        check_prompt(request.token_ids, parts.limits)
        sampling = read_sampling(request.sampling, parts.limits)
        if len(request.cache_key) > MAX_CACHE_KEY:
            raise invalid_field("cache_key", request.cache_key, f"at most {MAX_CACHE_KEY} characters")
        if self._generate_calls >= _MAX_GENERATE_CALLS:
            raise exhausted(
                Reason.REQUESTS_EXHAUSTED, f"{_MAX_GENERATE_CALLS} generations are running, which is the limit", 1.0
            )
        asked = GenerationRequest(
            list(request.token_ids),
            sampling,
            request.seed,
            parts.limits.max_sequence_tokens,
            # Keys of callers and of episodes never meet.
            cache_key=f"call-{request.cache_key}" if request.cache_key and parts.keep_prefixes else "",
            stream=True,
        )
        self._generate_calls += 1
        try:
            async with aclosing(parts.policy.generate(asked)) as pieces:
                async for piece in pieces:
                    yield rollout_pb2.GenerateResponse(
                        token_ids=piece.token_ids,
                        logprobs=piece.logprobs,
                        version=piece.version,
                        stop_reason=piece.stop_reason,
                    )
        except GenerationError as error:
            raise RollwireError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, str(error)) from error
        finally:
            self._generate_calls -= 1

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.UpdateWeightsResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        check_version("version", request.version)
        if request.source.WhichOneof("source") != "target":
            raise invalid_field("source", "unset", "source.target, the host:port of a learner")
        check_target("source.target", request.source.target)
        mode = read_pause_mode("pause_mode", request.pause_mode)
        timeout_s = context.time_remaining()
        update = await parts.updater.update(request.version, request.source.target, timeout_s, mode)
        return rollout_pb2.UpdateWeightsResponse(
            version=update.served.version,
            digest=update.served.digest,
            received_bytes=update.received_bytes,
            fetch_duration=_duration(update.fetch_s),
            pause_duration=_duration(update.pause_s),
        )

    async def CheckWeights(
        self, request: rollout_pb2.CheckWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.CheckWeightsResponse:
        """See the contract."""
        parts = self.loaded()
        if request.HasField("fence"):
            self._fencing.admit(request.fence)
        checked = await parts.checker.check()
        return rollout_pb2.CheckWeightsResponse(
            version=checked.served.version,
            digest=checked.served.digest,
            tensors=checked.tensors,
            unverified=checked.unverified,
        )

    async def Pause(
        self, request: rollout_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.PauseResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        mode = read_pause_mode("mode", request.mode)
        return rollout_pb2.PauseResponse(interrupted=await parts.pauser.pause(mode, read_lease_s(request)))

    async def Resume(
        self, request: rollout_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ResumeResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        parts.pauser.resume()
        return rollout_pb2.ResumeResponse()

    async def Sleep(
        self, request: rollout_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.SleepResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        return rollout_pb2.SleepResponse(freed_bytes=await parts.sleeper.sleep(read_sleep_level(request)))

    async def Wake(
        self, request: rollout_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.WakeResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        active = await parts.sleeper.wake()
        return rollout_pb2.WakeResponse(active_version=active.version if active is not None else None)

    async def OpenPolicySession(
        self, request: rollout_pb2.OpenPolicySessionRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.OpenPolicySessionResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        desk = _agents(parts)
        plan = read_open(request, parts.limits)
        required = request.required_version if request.HasField("required_version") else None
        if required is not None:
            check_version("required_version", required)
        desk.sessions.open(plan, lambda: _require_version(parts.policy, required))
        return rollout_pb2.OpenPolicySessionResponse(base_url=desk.base_url, model=desk.model)

    async def ClosePolicySession(
        self, request: rollout_pb2.ClosePolicySessionRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ClosePolicySessionResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        check_session_id(request.session_id)
        return _agents(parts).sessions.close(request)

    async def ListPolicySessions(
        self, request: rollout_pb2.ListPolicySessionsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ListPolicySessionsResponse:
        """See the contract."""
        parts = self.loaded()
        self._fencing.admit(request.fence)
        sessions = [] if parts.agents is None else parts.agents.sessions.listed(request.fence.run_id)
        return rollout_pb2.ListPolicySessionsResponse(sessions=sessions)

    def loaded(self) -> Parts:
        """Returns the parts. Raises `RollwireError`, UNAVAILABLE / `NO_WEIGHTS`, while the model is being loaded."""
        if self.parts is None:
            raise RollwireError(
                grpc.StatusCode.UNAVAILABLE,
                Reason.NO_WEIGHTS,
                "the rollout server is still loading its model; wait until its health service says SERVING",
                retry_after_s=_LOADING_RETRY_S,
            )
        return self.parts


def _require_version(policy: Policy, required: weights_pb2.WeightVersion | None) -> None:
    active = policy.states.active
    if active is None:
        raise no_weights()
    if required is not None and active.version != required:
        raise precondition(
            Reason.WRONG_VERSION,
            f"required_version is {version_text(required)}, but {version_text(active.version)} is active; call "
            "UpdateWeights first",
            active=version_text(active.version),
        )


def _agents(parts: Parts) -> AgentDesk:
    if parts.agents is None:
        raise precondition(
            Reason.AGENTS_DISABLED,
            "this rollout server has no HTTP edge for agents; start it with rollout.http.address=HOST:PORT",
        )
    return parts.agents


async def _refuse_unknown_tag(pool: EnvironmentPool, plan: GroupPlan) -> None:
    """Refuses a tag that is not offered at once; a server that cannot be asked fails its episodes later, as data."""
    try:
        await pool.describe(plan.targets, plan.environment_tag)
    except RollwireError as error:
        if error.reason == Reason.UNKNOWN_ENVIRONMENT:
            raise


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(int(seconds * 1e9))
    return found


def _resident_bytes() -> int:
    """Returns the resident set size of this process, 0 where Linux's /proc is missing."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
