"""The choice of the device, and that its settings are applied."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rollwire.serving import accelerator
from rollwire.serving.accelerator import prepare, select_device
from rollwire.serving.server import ServeError


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def with_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind) if kind else None)


@pytest.mark.parametrize(
    ("setting", "present", "chosen"),
    [
        ("auto", None, "cpu"),
        ("auto", "cuda", "cuda"),
        ("cpu", "cuda", "cpu"),
        ("cuda", "cuda", "cuda"),
        ("auto", "mps", "cpu"),
    ],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, setting: str, present: str | None, chosen: str) -> None:
    with_accelerator(monkeypatch, present)
    assert select_device(setting).type == chosen


@pytest.mark.parametrize(("setting", "present"), [("cuda", None), ("cuda", "mps")])
def test_a_device_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, setting: str, present: str | None
) -> None:
    with_accelerator(monkeypatch, present)
    with pytest.raises(ServeError, match=f"device is '{setting}'.*device=auto"):
        select_device(setting)


def test_npus_are_there_once_torch_npu_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with_accelerator(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(ServeError, match=r"device is 'npu', but torch .* finds cpu alone; install torch-npu"):
        select_device("npu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="npu"))
    assert select_device("npu").type == "npu"
    monkeypatch.delitem(sys.modules, "torch_npu")
    with pytest.raises(
        ServeError, match=r"torch_npu cannot be imported \(ModuleNotFoundError.*extra ascend.*set_env.sh"
    ):
        select_device("npu")


def test_npus_get_plain_formats_and_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(config=SimpleNamespace(allow_internal_format=True), get_device_name=lambda: "Ascend910B3")
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setenv("HCCL_NPU_SOCKET_PORT_RANGE", "restored afterwards")
    monkeypatch.delenv("HCCL_NPU_SOCKET_PORT_RANGE")
    monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050")
    found = prepare(device="npu")
    assert module.config.allow_internal_format is False
    assert os.environ["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"
    assert os.environ["HCCL_HOST_SOCKET_PORT_RANGE"] == "60000-60050", "a user's variables are left alone"
    assert found.wide == torch.float32 and not found.fused_optimizer and found.attention is None


def test_settings_are_applied_and_reported() -> None:
    found = prepare(device="cpu", attention="eager", torch_threads=1, deterministic=True)
    assert (found.device.type, found.attention, found.threads, found.deterministic) == ("cpu", "eager", 1, True)
    assert found.wide == torch.float64
    assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
    plain = prepare(device="cpu")
    assert plain.attention is None and not torch.are_deterministic_algorithms_enabled()


def test_every_device_type_is_described() -> None:
    assert set(accelerator._AUTO_ATTENTION) == set(accelerator.DEVICE_TYPES)
