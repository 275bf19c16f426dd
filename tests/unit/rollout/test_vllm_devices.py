"""What vLLM is told on accelerators, sleep mode and Ascend above all; names as in vllm-ascend 0.23.0."""

from __future__ import annotations

from typing import Any

import pytest

from rollwire.rollout.engines.vllm_settings import (
    EngineRequest,
    apply,
    check_environment,
    choose,
    sleep_disabled,
)
from rollwire.serving.config.sections import VllmSection
from rollwire.serving.server import ServeError

SLEEPS = VllmSection(sleep_mode=True)


def asked(device: str) -> EngineRequest:
    return EngineRequest("/model", "bfloat16", device, 1000, 64, 1, False, 1024)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_sleep_mode_is_for_accelerators_and_chosen_by_the_user(device: str) -> None:
    assert "enable_sleep_mode" not in choose(asked(device), VllmSection()).arguments
    assert choose(asked(device), SLEEPS).arguments.get("enable_sleep_mode", False) == (device != "cpu")
    assert sleep_disabled(asked(device), SLEEPS) == ""
    assert ("rollout.vllm.sleep_mode=true" in sleep_disabled(asked(device), VllmSection())) == (device != "cpu")


@pytest.mark.parametrize(
    ("device", "name", "value", "refused"),
    [
        ("npu", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", True),
        ("npu", "PYTORCH_NPU_ALLOC_CONF", "page_size:1g, expandable_segments : True", True),
        ("npu", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", False),
        ("npu", "PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:512", False),
        ("npu", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False),
        ("cuda", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("cuda", "PYTORCH_ALLOC_CONF", "expandable_segments:True", True),
        ("cpu", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False),
    ],
)
def test_expandable_segments_exclude_sleep_mode(device: str, name: str, value: str, refused: bool) -> None:
    check_environment({name: value}, device, VllmSection())
    if refused:
        with pytest.raises(ServeError, match=rf"^{name} is .*take expandable_segments:True out.*sleep_mode=false"):
            check_environment({name: value}, device, SLEEPS)
    else:
        check_environment({name: value}, device, SLEEPS)


@pytest.mark.parametrize("name", ["VLLM_ASCEND_ENABLE_NZ", "VLLM_ASCEND_ENABLE_FUSED_MC2", "DYNAMIC_EPLB"])
def test_what_would_break_weight_updates_on_ascend_is_refused(name: str) -> None:
    with pytest.raises(ServeError, match=f"{name} is 'true', which .* unset it"):
        check_environment({name: "true"}, "npu", VllmSection())
    for value in ("0", "", "false"):
        check_environment({name: value}, "npu", VllmSection())
    check_environment({name: "1"}, "cuda", VllmSection())


def test_plugins_of_ascend_must_not_be_kept_out() -> None:
    whole = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader"
    check_environment({"VLLM_PLUGINS": f"mine,{whole}"}, "npu", VllmSection())
    check_environment({"VLLM_PLUGINS": "mine"}, "cuda", VllmSection())
    with pytest.raises(ServeError, match=r"keeps vllm-ascend's ascend_kv_connector, ascend_model_loader out; unset it"):
        check_environment({"VLLM_PLUGINS": "ascend,ascend_model"}, "npu", VllmSection())
    with pytest.raises(ServeError, match="ascend, ascend_kv_connector"):
        check_environment({"VLLM_PLUGINS": ""}, "npu", VllmSection())


def test_variables_of_ascend() -> None:
    chosen = choose(asked("npu"), VllmSection(gpu_memory_utilization=0.5))
    assert chosen.environment["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert chosen.environment["TASK_QUEUE_ENABLE"] == "1"
    assert chosen.environment["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"
    assert chosen.environment["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
    assert chosen.environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert chosen.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "PYTORCH_NPU_ALLOC_CONF" not in chosen.environment, "vllm-ascend chooses it without sleep mode"
    assert chosen.arguments["gpu_memory_utilization"] == 0.5
    assert chosen.arguments["dtype"] == "bfloat16"
    assert chosen.arguments["enforce_eager"] is False, "ACL graphs write into the storage that updates write into"


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_what_was_set_and_what_was_found_is_logged(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = choose(asked(device), SLEEPS)
    for name in ["ROLLWIRE_ENGINE_OWNER_PID", *settings.environment]:
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "rollwire.rollout.engines.vllm_settings._log",
        type("Log", (), {"info": lambda _, text, **fields: logged.append(fields)})(),
    )
    apply(settings)
    (line,) = logged
    assert line["arguments"]["enable_sleep_mode"] is True
    if device == "npu":
        assert line["environment"]["HCCL_NPU_SOCKET_PORT_RANGE"] == "61000-61050"
        assert line["environment"]["VLLM_ASCEND_ENABLE_NZ"] == "0"
        assert line["found"]["ASCEND_RT_VISIBLE_DEVICES"] == "3" and line["found"]["PYTORCH_NPU_ALLOC_CONF"] == "unset"
