"""A real rollout server on a loopback port, with a learner and environments whose every answer a test can script."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
import transformers

from rollwire.client.rollout import RolloutClient
from rollwire.policies import resolve
from rollwire.rollout.service import RolloutServer
from rollwire.rpc.errors import Reason, not_found
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, INTERNAL_MESSAGE_BYTES
from rollwire.rpc.weight_stream import HostTensor, build_manifest, stream_messages
from rollwire.serving.config.models import RunConfig
from rollwire.serving.model_tensors import named_weights, to_host
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    rollout_pb2,
    trajectory_pb2,
    weights_pb2,
    weights_pb2_grpc,
)

Messages = Iterable[weights_pb2.FetchWeightsResponse]
LINEAGE = "lineage-test"


def version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage=LINEAGE, step=step)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with the tiny policy's tokenizer."""
    directory = tmp_path_factory.mktemp("policy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve("builtin:tiny")) / name, directory / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def weights(model_directory: Path) -> Callable[[int], dict[str, HostTensor]]:
    """Returns the weights of a step: the checkpoint's, with noise that the step determines."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory)
    initial = {name: tensor.detach().clone() for name, tensor in named_weights(model)}

    def make(step: int) -> dict[str, HostTensor]:
        noise = torch.Generator().manual_seed(step)
        return {
            name: to_host(tensor + 0.1 * step * torch.randn(tensor.shape, generator=noise), torch.float32)
            for name, tensor in initial.items()
        }

    return make


class FakeLearner(weights_pb2_grpc.WeightsServiceServicer):
    """Serves real weights; `fault` may change the messages of a stream, `hold` delays it after its manifest."""

    full_name = "rollwire.v1.WeightsService"
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, weights: Callable[[int], dict[str, HostTensor]]) -> None:
        self.weights = weights
        self.fault: Callable[[list[weights_pb2.FetchWeightsResponse]], Messages] = lambda messages: messages
        self.hold = asyncio.Event()
        self.hold.set()
        self.fetches = 0
        self.chunk_bytes = 10_000

    def register(self, server: grpc.aio.Server) -> None:
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(self, server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        self.hold.set()

    def messages(self, step: int, tensors: dict[str, HostTensor] | None = None) -> list[Any]:
        tensors = self.weights(step) if tensors is None else tensors
        manifest = build_manifest(version(step), tensors)
        return list(stream_messages(manifest, [tensor.data for tensor in tensors.values()], self.chunk_bytes))

    async def FetchWeights(
        self, request: weights_pb2.FetchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        self.fetches += 1
        if request.version.lineage != LINEAGE:
            raise not_found(Reason.UNKNOWN_VERSION, "no such version")
        for message in self.fault(self.messages(request.version.step)):
            yield message
            await self.hold.wait()


@dataclass
class Script:
    """How the fake environment behaves; options of a session override it by name."""

    turns: int = 3
    max_turns: int = 10
    fail_open: int = 0
    fail_at: int = -1
    kind: int = environment_pb2.ENVIRONMENT_FAILURE_KIND_ERROR
    error_at: int = -1
    error: BaseException | None = None
    reward: float = 0.5
    step_s: float = 0.0
    never_ends: bool = False
    observation: str = "____"
    suffix: str = ""
    open_errors: list[BaseException] = field(default_factory=list)


class FakeEnvironments(environment_pb2_grpc.EnvironmentServiceServicer):
    """One scripted environment, `Lake`."""

    full_name = "rollwire.v1.EnvironmentService"
    message_bytes = ENVIRONMENT_MESSAGE_BYTES

    def __init__(self) -> None:
        self.script = Script()
        self.sessions: dict[str, int] = {}
        self.opened: list[environment_pb2.OpenSessionRequest] = []
        self.closed: list[str] = []
        self.actions: list[str] = []
        self.stepped = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        pass

    async def ListEnvironments(self, request: Any, context: Any) -> environment_pb2.ListEnvironmentsResponse:
        entry = environment_pb2.EnvironmentDescription(tag="Lake", max_turns=10)
        entry.metric_aggregation["steps"] = environment_pb2.METRIC_AGGREGATION_SUM
        return environment_pb2.ListEnvironmentsResponse(environments=[entry], session_capacity=64)

    async def OpenSession(
        self, request: environment_pb2.OpenSessionRequest, context: Any
    ) -> environment_pb2.OpenSessionResponse:
        if self.script.open_errors:
            raise self.script.open_errors.pop(0)
        self.opened.append(request)
        if self.script.fail_open:
            return environment_pb2.OpenSessionResponse(
                failure=environment_pb2.EnvironmentFailure(kind=self.script.kind, type="Boom", message="cannot start")
            )
        session_id = f"s{len(self.opened)}"
        self.sessions[session_id] = 0
        return environment_pb2.OpenSessionResponse(
            session_id=session_id,
            instructions="Play.",
            observation=self.script.observation,
            max_turns=self.script.max_turns,
            lease=request.lease,
        )

    async def Step(self, request: environment_pb2.StepRequest, context: Any) -> environment_pb2.StepResponse:
        script = self.script
        if request.session_id not in self.sessions:
            raise not_found(Reason.UNKNOWN_SESSION, "no such session")
        assert self.sessions[request.session_id] == request.turn
        self.sessions[request.session_id] += 1
        self.actions.append(request.action)
        self.stepped.set()
        await asyncio.sleep(script.step_s)
        if request.turn == script.error_at and script.error is not None:
            raise script.error
        if request.turn == script.fail_at:
            return environment_pb2.StepResponse(
                failure=environment_pb2.EnvironmentFailure(kind=script.kind, type="Boom", message="it broke")
            )
        last = request.turn + 1 >= script.turns and not script.never_ends
        return environment_pb2.StepResponse(
            observation=script.observation,
            reward=script.reward,
            terminated=last,
            metrics={"steps": 1.0, "turn": float(request.turn)},
            suffix=script.suffix,
        )

    async def RenewSession(self, request: Any, context: Any) -> environment_pb2.RenewSessionResponse:
        return environment_pb2.RenewSessionResponse()

    async def CloseSession(self, request: Any, context: Any) -> environment_pb2.CloseSessionResponse:
        self.sessions.pop(request.session_id, None)
        self.closed.append(request.session_id)
        return environment_pb2.CloseSessionResponse()


@dataclass
class Bench:
    """A rollout server, its client, and the fakes around it."""

    client: RolloutClient
    server: RolloutServer
    learner: FakeLearner
    learner_address: str
    environments: FakeEnvironments
    environment_address: str

    @staticmethod
    def version(step: int) -> weights_pb2.WeightVersion:
        """Returns the fake learner's version of a step."""
        return version(step)

    async def update(self, step: int, **changes: Any) -> rollout_pb2.UpdateWeightsResponse:
        """Activates the weights of a step."""
        request = rollout_pb2.UpdateWeightsRequest(
            fence=trajectory_pb2.Fence(run_id="run", epoch=1),
            version=version(step),
            source=weights_pb2.WeightSource(target=self.learner_address),
        )
        for name, value in changes.items():
            getattr(request, name).CopyFrom(value)
        return await self.client.update_weights(request, timeout_s=20)

    def group(self, **changes: Any) -> rollout_pb2.RunGroupRequest:
        """Returns the request for a group of three episodes."""
        settings: dict[str, Any] = {
            "fence": trajectory_pb2.Fence(run_id="run", epoch=1),
            "group_id": "g1",
            "environment_tag": "Lake",
            "environment_seed": 11,
            "episodes": 3,
            "sampling_seed": 5,
            "sampling": trajectory_pb2.SamplingSettings(max_tokens=6),
        }
        return rollout_pb2.RunGroupRequest(**{**settings, **changes})

    async def play(self, *, timeout_s: float = 20, **changes: Any) -> list[rollout_pb2.RunGroupResponse]:
        """Plays a group to its end."""
        return [result async for result in self.client.run_group(self.group(**changes), timeout_s=timeout_s)]


Serve = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def serve(model_directory: Path, weights: Callable[[int], dict[str, HostTensor]]) -> Iterator[Serve]:
    """Returns a context manager that serves a bench; arguments are configuration sections."""

    @asynccontextmanager
    async def run(*, active: int | None = 0, **sections: Any) -> AsyncIterator[Bench]:
        learner, environments = FakeLearner(weights), FakeEnvironments()
        async with (
            serving(learner, Binding(), grace_s=0.2) as learning,
            serving(environments, Binding(), grace_s=0.2) as playing,
        ):
            rollout = {"max_episode_tokens": 512, "max_new_tokens_per_turn": 8, **sections.pop("rollout", {})}
            services = {"environment": [playing.address], **sections.pop("services", {})}
            batch = {"episodes_per_group": 2}
            config = RunConfig.model_validate(
                {
                    "model": {"path": str(model_directory), **sections.pop("model", {})},
                    "device": "cpu",
                    "batch": batch,
                    "rollout": rollout,
                    "services": services,
                    **sections,
                }
            )
            service = RolloutServer(config)
            async with (
                serving(service, Binding(), grace_s=0.5) as server,
                RolloutClient(server.address) as client,
            ):
                bench = Bench(client, service, learner, learning.address, environments, playing.address)
                if active is not None:
                    await bench.update(active)
                yield bench
        torch.use_deterministic_algorithms(False)

    yield run
