"""Ways to load weights that only vLLM has, and architectures that its loader treats in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwire.rollout.engine import GenerationRequest
from rollwire.rollout.engines.vllm_engine import VllmEngine
from rollwire.rollout.engines.vllm_start import start_vllm_engine
from rollwire.rollout.host_file import shared_memory
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_stream import HostTensor
from rollwire.serving.config.sections import ModelSection, VllmSection
from rollwire.serving.model_tensors import held_digest, layouts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPT = [(7 * position + 3) % 90 for position in range(41)]


async def assert_scores(kit: Any, engine: VllmEngine, model: Any) -> None:
    """Asserts that log-probabilities are those of a plain forward pass."""
    for temperature in (1.0, 0.7):
        request = GenerationRequest(PROMPT, kit.sampling(8, temperature=temperature), 1, 256)
        assert kit.gap(model, request, await kit.complete(engine, request)) < 1e-4


@pytest.mark.parametrize("only", ["layers.1.self_attn.q_proj", "layers.0.mlp.up_proj", "embed_tokens", "norm", "bias"])
async def test_partial_updates(kit: Any, shared_engine: VllmEngine, only: str) -> None:
    model = kit.make_model("qwen2_tied", seed=2)
    await shared_engine.load_weights(kit.version(1), kit.host_tensors(model))
    kit.perturb(model, 0.1, only)
    changed = kit.host_tensors(model, only)
    assert changed
    digest = await shared_engine.load_weights(kit.version(2), changed)
    assert digest == held_digest(model, torch.float32)
    assert await shared_engine.held_digest() == digest
    await assert_scores(kit, shared_engine, model)


async def test_tensors_in_shared_memory_are_loaded_from_where_they_are(kit: Any, shared_engine: VllmEngine) -> None:
    model = kit.make_model("qwen2_tied", seed=3)
    tensors = kit.host_tensors(model)
    buffer = HostBuffers(shared_memory).take(sum(tensor.data.nbytes + 64 for tensor in tensors.values()))
    placed, offset = {}, 0
    for name, tensor in reversed(tensors.items()):
        size = tensor.data.nbytes
        buffer[offset : offset + size] = tensor.data
        placed[name] = HostTensor(tensor.dtype, tensor.shape, buffer[offset : offset + size])
        offset += -(-size // 64) * 64
    digest = await shared_engine.load_weights(kit.version(1), placed)
    assert digest == held_digest(model, torch.float32)
    await assert_scores(kit, shared_engine, model)


async def test_weights_of_another_shape_are_refused_and_the_next_load_heals(
    kit: Any, shared_engine: VllmEngine
) -> None:
    model = kit.make_model("qwen2_tied", seed=5)
    tensors = kit.host_tensors(model)
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = HostTensor(tensors[name].dtype, (64, 48), tensors[name].data[: 64 * 48 * 4])
    request = GenerationRequest(PROMPT, kit.sampling(4), 1, 256)
    for broken in ({**tensors, name: wrong}, {**tensors, "model.layers.9.norm.weight": wrong}):
        with pytest.raises(RollwireError, match=r"INTERNAL/INTERNAL: .*"):
            await shared_engine.load_weights(kit.version(7), broken)
        with pytest.raises(Exception, match="main@7"):
            await kit.complete(shared_engine, request)
        with pytest.raises(RollwireError, match="the engine has no weights"):
            await shared_engine.load_weights(kit.version(8), kit.host_tensors(model, "norm"))
    digest = await shared_engine.load_weights(kit.version(8), tensors)
    assert digest == held_digest(model, torch.float32)
    await assert_scores(kit, shared_engine, model)


async def test_a_part_is_staged_while_generating(kit: Any, shared_engine: VllmEngine) -> None:
    model = kit.make_model("qwen2_tied", seed=7)
    await shared_engine.load_weights(kit.version(0), kit.host_tensors(model))
    held = await shared_engine.held_digest()
    kit.perturb(model, 0.1, "layers.1")
    changed = kit.host_tensors(model, "layers.1")
    await shared_engine.stage_weights(kit.version(1), changed)
    assert await shared_engine.held_digest() == held
    digest = await shared_engine.load_weights(kit.version(1), changed)
    assert digest == held_digest(model, torch.float32) == await shared_engine.held_digest()
    await assert_scores(kit, shared_engine, model)


@pytest.mark.parametrize(("name", "ranks"), [("gemma2_tied", 1), ("gemma3_tied", 1), ("qwen2_tied", 2)])
async def test_other_architectures_and_ranks(
    kit: Any, model_directory: Callable[[str], Path], name: str, ranks: int
) -> None:
    shared_before = {path.name for path in Path("/dev/shm").glob("*cpushm*")}
    engine = await start_vllm_engine(
        ModelSection(path=str(model_directory(name))),
        device="cpu",
        max_sequence_tokens=256,
        max_concurrent_sequences=16,
        options=VllmSection(tensor_parallel_size=ranks),
    )
    try:
        model = kit.make_model(name, seed=6)
        assert dict(engine.layouts()) == layouts(model, torch.float32)
        for step in (1, 2, 3):
            kit.perturb(model)
            tensors = kit.host_tensors(model)
            if step == 3:
                await engine.stage_weights(kit.version(step), tensors)
            digest = await engine.load_weights(kit.version(step), tensors)
            assert digest == held_digest(model, torch.float32) == await engine.held_digest()
            await assert_scores(kit, engine, model)
    finally:
        await engine.close()
    assert {path.name for path in Path("/dev/shm").glob("*cpushm*")} <= shared_before
