"""Small servers that stand for environment, learner and rollout server of a coordinator under test."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from policy_kit import PolicySessionsFake

from rollwire.coordinator.budgets import Budgets
from rollwire.rpc.digests import samples_digest
from rollwire.rpc.errors import Reason, RollwireError, exhausted, invalid_field, precondition
from rollwire.serving.server import Readiness
from rollwire.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    learner_pb2,
    learner_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trajectory_pb2,
    weights_pb2,
)

LINEAGE = "line"
BUDGETS = Budgets(attempts=3, retry_delay_s=0.01, lost_s=1.5, poll_s=0.02, watch_s=0.05)


def digest_of(step: int) -> bytes:
    return hashlib.sha256(f"weights {step}".encode()).digest()


def unavailable(message: str = "gone") -> RollwireError:
    return RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, message)


def no_gap(samples: list[learner_pb2.TrainSample]) -> dict[str, float]:
    """What a learner reports that agrees with the engine exactly; nothing without samples that can be compared."""
    tokens = 2.0 * sum(sample.comparable_logprobs for sample in samples)
    found = {"tokens": tokens, "mean": 0.0, "max": 0.0, "k3": 0.0} if tokens else {}
    return {f"actor/logprob_gap_{name}": value for name, value in found.items()}


CRITIC_METRICS = {
    **{f"critic/{name}": 0.5 for name in ("loss", "error", "vpred", "clipfrac", "grad_norm", "lr", "skipped_steps")},
    "time/critic/train_step/total": 0.1,
}


class FakeService:
    """What `serving` needs, around a servicer."""

    message_bytes = 8 << 20
    full_name = ""
    add: Callable[[Any, grpc.aio.Server], None]

    def register(self, server: grpc.aio.Server) -> None:
        type(self).add(self, server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        pass


class FakeEnvironment(FakeService, environment_pb2_grpc.EnvironmentServiceServicer):
    full_name = "rollwire.v1.EnvironmentService"
    add = staticmethod(environment_pb2_grpc.add_EnvironmentServiceServicer_to_server)

    async def ListEnvironments(self, request: Any, context: Any) -> environment_pb2.ListEnvironmentsResponse:
        tags = [environment_pb2.EnvironmentDescription(tag=tag, max_turns=1) for tag in ("FrozenLake", "Sokoban")]
        return environment_pb2.ListEnvironmentsResponse(environments=tags, session_capacity=64)

    async def OpenSession(self, request: Any, context: Any) -> environment_pb2.OpenSessionResponse:
        for name, value in request.options.items():
            raise invalid_field(f"options.{name}", int(value), "nothing")
        return environment_pb2.OpenSessionResponse()


class FakeLearner(FakeService, learner_pb2_grpc.LearnerServiceServicer):
    """Counts steps. `before_train` and `after_train` may raise; the latter after the step was committed."""

    full_name = "rollwire.v1.LearnerService"
    add = staticmethod(learner_pb2_grpc.add_LearnerServiceServicer_to_server)

    def __init__(self) -> None:
        self.step = 0
        self.lineage = LINEAGE
        self.steps: list[tuple[learner_pb2.TrainHeader, list[learner_pb2.TrainSample]]] = []
        self.calls = 0
        self.answers: dict[int, bytes] = {}
        self.before_train: Callable[[], None] = lambda: None
        self.after_train: Callable[[], None] = lambda: None
        self.digest_of = digest_of
        self.exports: list[str] = []
        self.log: list[str] = []
        self.asleep = False
        self.wake_fault: Callable[[], None] = lambda: None
        self.device = "cpu"
        self.vocabulary_size = 100
        self.gap: Callable[[list[learner_pb2.TrainSample]], dict[str, float]] = no_gap
        self.scored: list[list[learner_pb2.TrainSample]] = []
        self.scores_as = -1.0
        self.models = [learner_pb2.SCORED_MODEL_POLICY]
        self.value = 0.25
        self.left_out = 0
        self.scored_models: list[int] = []
        self.before_score: Callable[[], None] = lambda: None
        self.checkpoints: dict[str, tuple[str, int, dict[int, bytes]]] = {}
        self.before_save: Callable[[], None] = lambda: None
        self.damaged: set[str] = set()
        self.loads: list[tuple[str, bool]] = []

    def restart(self) -> None:
        """Forgets what a process forgets that is started again; checkpoints are on disk."""
        self.lineage, self.step, self.answers = f"{self.lineage}-restarted", 0, {}

    async def GetInfo(self, request: Any, context: Any) -> learner_pb2.LearnerServiceGetInfoResponse:
        return learner_pb2.LearnerServiceGetInfoResponse(
            version=weights_pb2.WeightVersion(lineage=self.lineage, step=self.step),
            digest=self.digest_of(self.step),
            model_architecture="TinyForCausalLM",
            max_sequence_tokens=4096,
            vocabulary_size=self.vocabulary_size,
            device=self.device,
            policy_losses=["ppo_clip"],
            models=self.models,
            resident_bytes=3 << 20,
        )

    async def Train(self, request_iterator: Any, context: Any) -> learner_pb2.TrainResponse:
        self.calls += 1
        header, samples, commit = None, [], None
        async for request in request_iterator:
            if request.WhichOneof("part") == "header":
                header = request.header
            elif request.WhichOneof("part") == "samples":
                samples.extend(request.samples.samples)
            else:
                commit = request.commit
        assert header is not None and commit is not None
        assert commit.samples == len(samples) and commit.digest == samples_digest(samples)
        self.require_awake()
        self.before_train()
        self.log.append(f"train {header.base_version.step}")
        base = header.base_version
        known = self.answers.get(base.step) if base.lineage == self.lineage else None
        if known is None:
            if base.lineage != self.lineage or base.step != self.step:
                raise precondition(Reason.WRONG_VERSION, f"the present version is {self.lineage}@{self.step}")
            self.steps.append((header, samples))
            self.answers[self.step] = commit.digest
            self.step += 1
        elif known != commit.digest:
            raise precondition(Reason.STEP_CONFLICT, "another batch")
        self.after_train()
        return learner_pb2.TrainResponse(
            version=weights_pb2.WeightVersion(lineage=self.lineage, step=base.step + 1),
            metrics={
                "actor/pg_loss": 0.5,
                "actor_train/grad_norm": 1.0,
                "actor_train/loss_scale": 1.0,
                "critic/entropy/mean": 0.25,
                "time/actor_train/train_step/total": 0.1,
                **(CRITIC_METRICS if header.train_critic else {}),
                **self.gap(samples),
            },
            digest=self.digest_of(base.step + 1),
            repeated_answer=known is not None,
        )

    async def Score(self, request_iterator: Any, context: Any) -> AsyncIterator[learner_pb2.ScoreResponse]:
        async for request in request_iterator:
            assert request.temperature == 1.0
            self.scored.append(list(request.samples))
            self.scored_models.append(request.model)
            self.before_score()
            version = weights_pb2.WeightVersion(lineage=self.lineage, step=self.step)
            response = learner_pb2.ScoreResponse(version=version)
            for sample in request.samples:
                critic = request.model == learner_pb2.SCORED_MODEL_CRITIC
                value = self.value if critic else self.scores_as
                mask = sample.loss_mask[self.left_out :]
                found = {"values" if critic else "logprobs": [value if wanted else 0.0 for wanted in mask]}
                response.scores.add(sample_id=sample.sample_id, **found)
            yield response

    async def SaveCheckpoint(
        self, request: learner_pb2.SaveCheckpointRequest, context: Any
    ) -> learner_pb2.SaveCheckpointResponse:
        self.require_awake()
        self.before_save()
        self.log.append(f"save {self.step}")
        self.checkpoints[request.name] = (self.lineage, self.step, dict(self.answers))
        for name in list(self.checkpoints)[: -request.keep] if request.keep else []:
            del self.checkpoints[name]
        version = weights_pb2.WeightVersion(lineage=self.lineage, step=self.step)
        return learner_pb2.SaveCheckpointResponse(path=f"/checkpoints/{request.name}", version=version, bytes=5)

    async def LoadCheckpoint(
        self, request: learner_pb2.LoadCheckpointRequest, context: Any
    ) -> learner_pb2.LoadCheckpointResponse:
        assert request.fence.run_id and request.fence.epoch >= 2
        if request.name in self.damaged:
            raise RollwireError(grpc.StatusCode.DATA_LOSS, Reason.CHECKPOINT_CORRUPT, "a shard was changed")
        lineage, step, answers = self.checkpoints[request.name]
        assert request.version == weights_pb2.WeightVersion(lineage=lineage, step=step)
        self.loads.append((request.name, request.new_lineage))
        if request.new_lineage:
            lineage, step, answers = f"{lineage}-new", 0, {}
        self.lineage, self.step, self.answers = lineage, step, dict(answers)
        return learner_pb2.LoadCheckpointResponse(
            version=weights_pb2.WeightVersion(lineage=lineage, step=step), digest=self.digest_of(step)
        )

    def require_awake(self) -> None:
        if self.asleep:
            raise precondition(Reason.ASLEEP, "the learner is asleep")

    async def Sleep(self, request: Any, context: Any) -> learner_pb2.LearnerServiceSleepResponse:
        self.asleep = True
        self.log.append("learner sleeps")
        return learner_pb2.LearnerServiceSleepResponse()

    async def Wake(self, request: Any, context: Any) -> learner_pb2.LearnerServiceWakeResponse:
        self.wake_fault()
        self.asleep = False
        self.log.append("learner wakes")
        return learner_pb2.LearnerServiceWakeResponse()

    async def Export(self, request: learner_pb2.ExportRequest, context: Any) -> learner_pb2.ExportResponse:
        if request.name in self.exports:
            raise precondition(Reason.ALREADY_EXISTS, "taken")
        self.exports.append(request.name)
        return learner_pb2.ExportResponse(path=f"/exports/{request.name}")


Play = Callable[[rollout_pb2.RunGroupRequest, int], "float | trajectory_pb2.EpisodeFailure"]


def coin(request: rollout_pb2.RunGroupRequest, episode: int) -> float:
    """A score of 0 or 1 that depends on the request alone."""
    return float(hashlib.sha256(f"{request.sampling_seed}.{episode}".encode()).digest()[0] % 2)


class FakeRollout(PolicySessionsFake, FakeService, rollout_pb2_grpc.RolloutServiceServicer):
    """Plays one-turn episodes; `play` gives a score or a failure, `before_group` may wait or raise."""

    full_name = "rollwire.v1.RolloutService"
    add = staticmethod(rollout_pb2_grpc.add_RolloutServiceServicer_to_server)

    def __init__(self) -> None:
        super().__init__()
        self.version = weights_pb2.WeightVersion()
        self.updates: list[int] = []
        self.requests: list[rollout_pb2.RunGroupRequest] = []
        self.play: Play = coin
        self.digest_of = digest_of
        self.checks: list[int] = []
        self.generated: list[rollout_pb2.GenerateRequest] = []
        self.before_generate: Callable[[], None] = lambda: None
        self.check_fault: Callable[[], None] = lambda: None
        self.unverified: list[str] = []
        self.log: list[str] = []
        self.plays_with: Callable[[], int] = lambda: self.version.step
        self.capacity = 64
        self.in_flight = 0
        self.asleep = False

    async def before_group(self, request: rollout_pb2.RunGroupRequest) -> None:
        await asyncio.sleep(0)

    async def fetch(self, rollout: FakeRollout, request: rollout_pb2.UpdateWeightsRequest) -> None:
        """Called with the server that fetches; tests replace it."""

    async def before_update(self) -> None:
        await asyncio.sleep(0)

    async def GetInfo(self, request: Any, context: Any) -> rollout_pb2.RolloutServiceGetInfoResponse:
        return rollout_pb2.RolloutServiceGetInfoResponse(
            model_architecture="TinyForCausalLM",
            max_sequence_tokens=4096,
            episode_capacity=self.capacity,
            active_version=self.version,
            device="cpu",
            dtype=weights_pb2.DATA_TYPE_FLOAT32,
            resident_bytes=2 << 20,
            tokenizer_hash="a" * 64,
            template_hash="b" * 64,
        )

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Any
    ) -> rollout_pb2.UpdateWeightsResponse:
        await self.before_update()
        await self.fetch(self, request)
        assert request.source.target
        if self.asleep:
            self.log.append(f"stage {request.version.step}")
            raise precondition(Reason.ASLEEP, "the rollout server is asleep")
        self.version = request.version
        self.updates.append(request.version.step)
        self.log.append(f"update {request.version.step}")
        return rollout_pb2.UpdateWeightsResponse(
            version=request.version, digest=self.digest_of(request.version.step), received_bytes=100
        )

    async def Sleep(self, request: rollout_pb2.SleepRequest, context: Any) -> rollout_pb2.SleepResponse:
        assert not self.in_flight
        self.asleep, self.version = True, weights_pb2.WeightVersion()
        self.log.append("rollout sleeps")
        return rollout_pb2.SleepResponse()

    async def Wake(self, request: rollout_pb2.WakeRequest, context: Any) -> rollout_pb2.WakeResponse:
        self.asleep = False
        self.log.append("rollout wakes")
        return rollout_pb2.WakeResponse()

    async def CheckWeights(
        self, request: rollout_pb2.CheckWeightsRequest, context: Any
    ) -> rollout_pb2.CheckWeightsResponse:
        assert request.fence.run_id and request.fence.epoch >= 1
        self.check_fault()
        self.checks.append(self.version.step)
        self.log.append(f"check {self.version.step}")
        return rollout_pb2.CheckWeightsResponse(
            version=self.version, digest=self.digest_of(self.version.step), tensors=3, unverified=self.unverified
        )

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        self.before_generate()
        self.generated.append(request)
        for token in (7, 8):
            yield rollout_pb2.GenerateResponse(token_ids=[token], logprobs=[-1.0], version=self.version)

    async def RunGroup(
        self, request: rollout_pb2.RunGroupRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.RunGroupResponse]:
        if not self.version.lineage:
            raise precondition(Reason.NO_WEIGHTS, "no weights yet")
        if request.HasField("required_version") and request.required_version != self.version:
            raise precondition(Reason.WRONG_VERSION, "another version is active")
        if self.in_flight + len(request.episode_indices) > self.capacity:
            raise exhausted(Reason.EPISODES_EXHAUSTED, "full", 0.01)
        self.requests.append(request)
        self.log.append("play")
        self.in_flight += len(request.episode_indices)
        try:
            await self.before_group(request)
            for episode in request.episode_indices:
                outcome = self.play(request, episode)
                if isinstance(outcome, trajectory_pb2.EpisodeFailure):
                    outcome.group_id, outcome.episode_index = request.group_id, episode
                    outcome.attempt = request.attempt
                    yield rollout_pb2.RunGroupResponse(failure=outcome)
                else:
                    yield rollout_pb2.RunGroupResponse(trajectory=self._trajectory(request, episode, outcome))
        finally:
            self.in_flight -= len(request.episode_indices)

    def _trajectory(
        self, request: rollout_pb2.RunGroupRequest, episode: int, score: float
    ) -> trajectory_pb2.Trajectory:
        trajectory = trajectory_pb2.Trajectory(
            trajectory_id=f"{request.group_id}.{episode}.{request.attempt}",
            group_id=request.group_id,
            episode_index=episode,
            attempt=request.attempt,
            environment_tag=request.environment_tag,
            environment_seed=request.environment_seed,
            score=score,
            metrics={"success": score, "action_is_valid": 1.0},
            sampling=trajectory_pb2.SamplingSettings(
                temperature=1, top_p=1, logprob_mode=trajectory_pb2.LOGPROB_MODE_SAMPLED
            ),
        )
        version = weights_pb2.WeightVersion(lineage=self.version.lineage, step=self.plays_with())
        sequence = trajectory.sequences.add(
            token_ids=[1, 2, 3, 4], loss_mask=[False, False, True, True], logprobs=[0, 0, -1, -1]
        )
        span = sequence.version_spans.add(version=version)
        span.range.begin, span.range.end = 2, 4
        turn = trajectory.turns.add(reward=score, terminated=True)
        turn.prompt.end, turn.response.begin, turn.response.end = 2, 2, 4
        return trajectory
