"""Settings of vLLM per device, and what is refused, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollwire.rollout.engines.expert_names import check_experts, split_experts
from rollwire.rollout.engines.vllm_names import checkpoint_names
from rollwire.rollout.engines.vllm_settings import (
    EngineRequest,
    apply,
    check_environment,
    check_version,
    choose,
    kv_bytes_per_token,
)
from rollwire.rollout.engines.vllm_weights import WeightsNotHeldError, check_reports
from rollwire.rollout.host_file import FileEntry
from rollwire.serving.config.sections import VllmSection
from rollwire.serving.model_tensors import layouts
from rollwire.serving.server import ServeError
from rollwire.v1 import weights_pb2

MIB = 1 << 20
F32 = weights_pb2.DATA_TYPE_FLOAT32


def asked(**changes: Any) -> EngineRequest:
    settings: dict[str, Any] = {
        "model": "/models/policy",
        "dtype": "float32",
        "device": "cpu",
        "max_sequence_tokens": 1000,
        "max_concurrent_sequences": 64,
        "torch_threads": 1,
        "deterministic": False,
        "kv_bytes_per_token": 1024,
    }
    return EngineRequest(**{**settings, **changes})


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_what_every_device_gets(device: str) -> None:
    settings = choose(asked(device=device), VllmSection())
    assert settings.arguments["logprobs_mode"] == "processed_logprobs"
    assert settings.arguments["generation_config"] == "vllm"
    assert settings.arguments["enable_prefix_caching"] is True
    assert settings.environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert settings.arguments["max_model_len"] == 1000


@pytest.mark.parametrize("batched", [0, 16, 100_000])
def test_on_cpu_no_prompt_is_ever_split(batched: int) -> None:
    arguments = choose(asked(), VllmSection(max_batched_tokens=batched)).arguments
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= 1000 + 64
    assert arguments["enforce_eager"] is True


def test_on_accelerators_prompts_may_be_split() -> None:
    assert "enable_chunked_prefill" not in choose(asked(device="cuda"), VllmSection()).arguments
    chosen = choose(asked(device="cuda"), VllmSection(max_batched_tokens=512, kv_cache_mib=3)).arguments
    assert (chosen["max_num_batched_tokens"], chosen["kv_cache_memory_bytes"]) == (512, 3 * MIB)


def test_memory_for_keys_and_values_on_cpu() -> None:
    def chosen(options: VllmSection | None = None, **changes: Any) -> int:
        return int(choose(asked(**changes), options or VllmSection()).arguments["kv_cache_memory_bytes"])

    assert chosen() == 2 * 64 * 1024 * 1024 + 32 * 1024
    assert chosen(kv_bytes_per_token=1 << 20) == 4096 * MIB + 32 * MIB
    assert chosen(kv_bytes_per_token=1 << 23) == 1024 * 8 * MIB + 32 * 8 * MIB, "one sequence must fit"
    assert chosen(VllmSection(kv_cache_mib=7)) == 7 * MIB


def test_deterministic_runs_compute_one_sequence_at_a_time() -> None:
    arguments = choose(asked(deterministic=True), VllmSection()).arguments
    assert arguments["max_num_seqs"] == 1
    assert arguments["enable_prefix_caching"] is False


def test_size_of_one_token() -> None:
    config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert kv_bytes_per_token(config, 4, 1) == 2 * 3 * 2 * 8 * 4
    assert kv_bytes_per_token(config, 2, 4) == 2 * 3 * 1 * 8 * 2
    assert kv_bytes_per_token(SimpleNamespace(**vars(config), head_dim=32), 4, 1) == 2 * 3 * 2 * 32 * 4


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"])
def test_variables_that_open_the_engine_are_refused(name: str) -> None:
    with pytest.raises(ServeError, match=f"{name} is '1', which .* unset it"):
        check_environment({name: "1"}, "cpu", VllmSection())
    for value in ("0", ""):
        check_environment({name: value}, "cpu", VllmSection())


@pytest.mark.parametrize("version", ["0.22.3", "0.9.0+cpu"])
def test_old_versions_are_refused(version: str) -> None:
    with pytest.raises(ServeError, match=r"is too old; rollout\.engine=vllm needs 0\.23 to 0\.32"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.23.0", "0.31.0", "0.32.4+cpu", "1.0", "dev"])
def test_newer_versions_are_accepted(version: str) -> None:
    check_version(version)


def test_a_users_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("ROLLWIRE_ENGINE_OWNER_PID", "1")
    settings = choose(asked(device="cuda"), VllmSection())
    for name in settings.environment:
        if name != "VLLM_LOGGING_LEVEL":
            monkeypatch.delenv(name, raising=False)
    import os

    apply(settings)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["ROLLWIRE_ENGINE_OWNER_PID"] == str(os.getpid())
    for name in settings.environment:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma2_softcap"])
def test_names_come_from_the_configuration_alone(name: str, make_model: Any) -> None:
    import torch

    model = make_model(name)
    found = checkpoint_names(model.config, torch.float32)
    assert found.layouts == layouts(model, torch.float32)
    assert found.architecture == type(model).__name__
    tied = model.config.tie_word_embeddings
    assert found.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def entries(*sizes: int) -> list[FileEntry]:
    return [FileEntry(f"t{index}", F32, (size, 2), 64 * index, 8 * size) for index, size in enumerate(sizes)]


def report(held: dict[str, int], **problems: list[str]) -> dict[str, Any]:
    return {"held": held, "differing": [], "transformed": [], "stale": [], **problems}


def test_ranks_hold_everything_together() -> None:
    assert check_reports(entries(3, 4), [report({"t0": 6, "t1": 8})]) == []
    assert check_reports(entries(3, 4), [report({"t0": 4, "t1": 8}), report({"t0": 2, "t1": 8})]) == []
    assert check_reports(entries(3), [report({}, transformed=["t0"])]) == ["t0"]


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        (
            [report({"t0": 6}), report({"t0": 6}, differing=["t0"])],
            r"hold other values than were sent, such as \['t0'\]",
        ),
        ([report({"t0": 4})], "were not taken by the engine"),
        ([report({"t0": 4}), report({})], "were not taken by the engine"),
        (
            [report({"t0": 6}, stale=["lm_head.weight"])],
            r"of the engine were not written, such as \['lm_head.weight'\]",
        ),
    ],
)
def test_anything_missing_different_or_stale_is_an_error(reports: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(WeightsNotHeldError, match=words):
        check_reports(entries(3), reports)


def test_fused_experts_are_split_into_views() -> None:
    import torch

    both, down = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    named = dict(
        split_experts(
            [("l.experts.gate_up_proj", both), ("l.experts.down_proj", down), ("l.gate.weight", torch.ones(1))]
        )
    )
    assert torch.equal(named["l.experts.1.gate_proj.weight"], both[1, :3])
    assert torch.equal(named["l.experts.1.up_proj.weight"], both[1, 3:])
    assert torch.equal(named["l.experts.0.down_proj.weight"], down[0])
    assert named["l.experts.0.up_proj.weight"].untyped_storage().data_ptr() == both.untyped_storage().data_ptr()
    assert len(named) == 7


def test_unknown_experts_are_refused() -> None:
    from rollwire.rpc.weight_stream import TensorLayout

    fused = {"model.layers.0.mlp.experts.gate_up_proj": TensorLayout(F32, (2, 6, 4))}
    check_experts("qwen3_moe", fused.items())
    check_experts("gpt_oss", {"model.layers.0.mlp.experts.0.up_proj.weight": TensorLayout(F32, (6, 4))}.items())
    with pytest.raises(ServeError, match=r"cannot update the experts of 'gpt_oss'.*use rollout.engine=transformers"):
        check_experts("gpt_oss", fused.items())
