"""The worker extension and the engine on Ascend, against stand-ins with the shapes and names of vllm-ascend 0.23.0."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollwire.rollout.engine import EngineDescription
from rollwire.rollout.engines.vllm_names import CheckpointNames
from rollwire.rollout.engines.vllm_weights import check_reports, wire_entries
from rollwire.rollout.host_file import HostFile
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.weight_stream import HostTensor
from rollwire.v1 import rollout_pb2, weights_pb2

HOST, DISCARD = rollout_pb2.SLEEP_LEVEL_HOST, rollout_pb2.SLEEP_LEVEL_DISCARD
MIB = 1 << 20


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


class DeadError(Exception):
    """Stands in for vLLM's."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts stand-ins where Rollwire imports vLLM."""
    platform = SimpleNamespace(is_cpu=lambda: False, device_type="npu")
    utils = module("vllm.model_executor.layers.utils", dispatch_cpu_unquantized_gemm=None)
    for made in (
        module("vllm"),
        module("vllm.platforms", current_platform=platform),
        module("vllm.model_executor"),
        module("vllm.model_executor.layers", utils=utils),
        utils,
        module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(FINAL_ONLY=1, DELTA=2), SamplingParams=dict),
        module("vllm.v1"),
        module("vllm.v1.engine"),
        module("vllm.v1.engine.exceptions", EngineDeadError=DeadError),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.delenv("ROLLWIRE_ENGINE_OWNER_PID", raising=False)
    monkeypatch.delitem(sys.modules, "rollwire.rollout.engines.vllm_worker", raising=False)
    yield
    sys.modules.pop("rollwire.rollout.engines.vllm_worker", None)


class AscendUnquantizedLinearMethod:
    """Leaves weights as they are when the NZ format is off."""


class AscendUnquantizedFusedMoEMethod:
    """Turns weights round after loading."""


class Dense(torch.nn.Module):
    """A layer whose loader copies by name."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(3, 2, bias=False)
        self.proj.quant_method = AscendUnquantizedLinearMethod()  # type: ignore[assignment]

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


class AscendSampler:
    """As `AscendSampler()` is made: raw log-probabilities, whatever the engine was told."""

    def __init__(self) -> None:
        self.logprobs_mode = "raw_logprobs"
        self.topk_topp_sampler = SimpleNamespace(logprobs_mode="raw_logprobs")


def worker(model: torch.nn.Module) -> Any:
    extension = importlib.import_module("rollwire.rollout.engines.vllm_worker").RolloutWorker

    class NPUWorker(extension):  # type: ignore[misc]
        def __init__(self) -> None:
            self.device = torch.device("cpu")
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
            self.reloaded: list[str] = []
            self.model_runner = SimpleNamespace(model=model, sampler=AscendSampler(), reload_weights=self.reload)

        def reload(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
            self.reloaded += [name for name, _ in weights_iterator]

    return NPUWorker()


def host(**tensors: torch.Tensor) -> dict[str, HostTensor]:
    return {
        name.replace("__", "."): HostTensor(
            weights_pb2.DATA_TYPE_FLOAT32, tuple(tensor.shape), memoryview(tensor.contiguous().numpy()).cast("B")
        )
        for name, tensor in tensors.items()
    }


def test_the_samplers_mode_is_set_where_it_is_read() -> None:
    found = worker(Dense())
    assert found.rl_prepare() == {"logprobs_mode": "processed_logprobs", "reload": False}
    sampler = found.model_runner.sampler
    assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs"


def test_dense_weights_are_loaded_in_place_and_compared() -> None:
    model = Dense()
    found, storage = worker(model), model.proj.weight.data_ptr()
    found.rl_prepare()
    sent = torch.randn(2, 3)
    file = HostFile.around(host(proj__weight=sent))
    report = found.rl_load(file.path, wire_entries(file.entries), {}, True)
    assert torch.equal(model.proj.weight, sent) and model.proj.weight.data_ptr() == storage
    assert check_reports(file.entries, [report]) == [] and not found.reloaded


def test_experts_are_reloaded_by_the_runner_under_their_own_names() -> None:
    model = Dense()
    model.experts = torch.nn.Module()
    model.experts.quant_method = AscendUnquantizedFusedMoEMethod()  # type: ignore[assignment]
    found = worker(model)
    assert found.rl_prepare()["reload"] is True
    file = HostFile.around(host(proj__weight=torch.randn(2, 3), mlp__experts__gate_up_proj=torch.randn(2, 4, 3)))
    report = found.rl_load(file.path, wire_entries(file.entries), {}, True)
    assert sorted(found.reloaded) == [
        "mlp.experts.0.gate_proj.weight",
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.1.gate_proj.weight",
        "mlp.experts.1.up_proj.weight",
        "proj.weight",
    ]
    assert check_reports(file.entries, [report]) == ["proj.weight", "mlp.experts.gate_up_proj"]


@pytest.mark.parametrize("place", ["module", "implementation"])
@pytest.mark.parametrize("name", ["W_UV", "weight_fp32"])
def test_what_is_computed_from_weights_makes_a_reload_necessary(place: str, name: str) -> None:
    model = Dense()
    if place == "module":
        setattr(model.proj, name, torch.zeros(1))
    else:
        model.proj.impl = SimpleNamespace(**{name: torch.zeros(1)})  # type: ignore[assignment]
    assert worker(model).rl_prepare()["reload"] is True


class FakeVllm:
    """An `AsyncLLM` of two ranks on a card of 1000 MiB each, of which it takes 600."""

    def __init__(self, reload: bool = False) -> None:
        self.calls: list[Any] = []
        self.free = [400 * MIB, 400 * MIB]
        self.reload = reload
        self.error: Exception | None = None
        self.output_handler = None

    async def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        if method == "rl_free_bytes":
            return list(self.free)
        assert method == "rl_prepare"
        return [{"logprobs_mode": "processed_logprobs", "reload": self.reload}] * 2

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))
        if self.error:
            raise self.error
        self.free = [1000 * MIB, 1000 * MIB]

    async def wake_up(self) -> None:
        self.calls.append("wake_up")
        if self.error:
            raise self.error
        self.free = [free - 600 * MIB for free in self.free]

    async def check_health(self) -> None:
        pass

    async def generate(self, **_: Any) -> Any:
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[], logprobs=[], finish_reason="stop")])


def engine(fake: FakeVllm, device: str = "npu") -> Any:
    from rollwire.rollout.engines.vllm_engine import VllmEngine

    description = EngineDescription("vllm", "X", device, weights_pb2.DATA_TYPE_BFLOAT16, 9, 64, 4)
    return VllmEngine(fake, description, CheckpointNames("X", {}, {}), SimpleNamespace(failure=lambda: ""))  # type: ignore[arg-type]


@pytest.mark.parametrize(("level", "number"), [(HOST, 1), (DISCARD, 2)])
async def test_sleep_frees_the_memory_of_all_ranks_and_wake_takes_it(level: int, number: int) -> None:
    fake = FakeVllm()
    found = engine(fake)
    assert await found.sleep(level) == 2 * 600 * MIB
    assert await found.sleep(DISCARD) == 0, "there is nothing more to free"
    await found.wake()
    await found.wake()
    assert fake.calls == [("sleep", number, "abort"), "wake_up"] and fake.free == [400 * MIB] * 2


async def test_wake_does_not_begin_what_the_memory_does_not_suffice_for() -> None:
    fake = FakeVllm()
    found = engine(fake)
    await found.sleep(HOST)
    fake.free[1] = 599 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"rank 1 needs 600 MiB .*, 599 MiB are free"):
        await found.wake()
    assert "wake_up" not in fake.calls
    fake.free[1] = 600 * MIB
    await found.wake()
    assert fake.calls[-1] == "wake_up"


@pytest.mark.parametrize("method", ["sleep", "wake"])
async def test_an_engine_that_fails_half_way_has_failed(method: str) -> None:
    fake = FakeVllm()
    found = engine(fake)
    if method == "wake":
        await found.sleep(HOST)
    fake.error = RuntimeError("NPU Error: out of memory")
    with pytest.raises(RollwireError, match=r"half way: .*out of memory; restart the rollout server"):
        await (found.sleep(HOST) if method == "sleep" else found.wake())
    assert "restart the rollout server" in await found.failed()


async def test_on_cpu_prefixes_are_forgotten_and_nothing_is_freed() -> None:
    fake, reset = FakeVllm(), []

    async def reset_prefix_cache() -> bool:
        reset.append(1)
        return True

    fake.reset_prefix_cache = reset_prefix_cache  # type: ignore[attr-defined]
    found = engine(fake, "cpu")
    assert await found.sleep(HOST) == 0 and await found.sleep(DISCARD) == 0
    await found.wake()
    assert reset == [1, 1] and fake.calls == []


@pytest.mark.parametrize(
    ("device", "reload", "refuses"), [("npu", True, True), ("npu", False, False), ("cuda", True, False)]
)
async def test_experts_on_ascend_do_not_sleep(device: str, reload: bool, refuses: bool) -> None:
    found = engine(FakeVllm(reload), device)
    await found.prepare()
    assert ("experts wrongly" in found.description.sleep_disabled) == refuses
