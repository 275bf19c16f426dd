"""The engine computes what a plain forward pass of the same weights computes, after every kind of update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwire.rollout.engine import GenerationRequest
from rollwire.rollout.engines.vllm_engine import VllmEngine
from rollwire.rollout.engines.vllm_start import start_vllm_engine
from rollwire.rollout.host_file import shared_memory
from rollwire.rpc.digests import tensor_digest, weights_digest
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_stream import HostTensor
from rollwire.serving.config.sections import ModelSection, VllmSection
from rollwire.serving.model_tensors import held_digest, layouts
from rollwire.v1 import trajectory_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
RAW = trajectory_pb2.LOGPROB_MODE_RAW
PROMPT = [(7 * position + 3) % 90 for position in range(41)]
# Temperature, top-p, top-k.
SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5), (0.7, 0.9, 20), (0.0, 1.0, 0)]


def tensors_digest(tensors: dict[str, HostTensor]) -> bytes:
    return weights_digest((name, tensor_digest(tensor.data)) for name, tensor in tensors.items())


async def assert_scores(kit: Any, engine: VllmEngine, model: Any, bound: float = 1e-4) -> None:
    """Every sampling setting, in one batch: log-probabilities as of a plain forward pass."""
    requests = [
        GenerationRequest(
            PROMPT[: 40 - index], kit.sampling(8, temperature=temperature, top_p=top_p, top_k=top_k, **mode), index, 256
        )
        for mode in ({}, {"logprob_mode": RAW})
        for index, (temperature, top_p, top_k) in enumerate(SETTINGS)
    ]
    pieces = await asyncio.gather(*(kit.complete(engine, request) for request in requests))
    for request, piece in zip(requests, pieces, strict=True):
        expected = kit.reference_logprobs(model, request, piece.token_ids)
        gap = float((torch.tensor(piece.logprobs) - expected).abs().max())
        assert gap < bound, (request.sampling, gap)
    greedy = kit.greedy_tokens(model, list(requests[5].token_ids), 8)
    assert pieces[5].token_ids == greedy
    assert pieces[11].token_ids == greedy


async def test_full_updates_twice_in_a_row(kit: Any, shared_engine: VllmEngine) -> None:
    model = kit.make_model("qwen2_tied", seed=1)
    assert dict(shared_engine.layouts()) == layouts(model, torch.float32)
    for step in (1, 2, 3):
        kit.perturb(model)
        digest = await shared_engine.load_weights(kit.version(step), kit.host_tensors(model))
        assert digest == held_digest(model, torch.float32)
        assert await shared_engine.held_digest() == digest
        await assert_scores(kit, shared_engine, model)


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


async def test_staging_while_generating_changes_nothing_until_the_load(kit: Any, shared_engine: VllmEngine) -> None:
    model = kit.make_model("qwen2_tied", seed=7)
    await shared_engine.load_weights(kit.version(0), kit.host_tensors(model))
    for step in (1, 2, 3, 4):
        old = kit.host_tensors(model)
        only = "layers.1" if step == 4 else ""
        request = GenerationRequest(PROMPT, kit.sampling(60), step, 256)
        running = [asyncio.create_task(kit.complete(shared_engine, request)) for _ in range(4)]
        await asyncio.sleep(0.02)
        before = kit.make_model("qwen2_tied")
        before.load_state_dict(model.state_dict())
        kit.perturb(model, 0.02, only)
        tensors = kit.host_tensors(model, only)
        await shared_engine.stage_weights(kit.version(step), tensors)
        running.append(asyncio.create_task(kit.complete(shared_engine, request)))
        for piece in await asyncio.gather(*running):
            expected = kit.reference_logprobs(before, request, piece.token_ids)
            assert float((torch.tensor(piece.logprobs) - expected).abs().max()) < 1e-4
            assert piece.version == kit.version(step - 1)
        assert await shared_engine.held_digest() == tensors_digest(old)
        digest = await shared_engine.load_weights(kit.version(step), tensors)
        assert digest == held_digest(model, torch.float32)
        assert await shared_engine.held_digest() == digest
        await assert_scores(kit, shared_engine, model)


async def test_what_was_staged_is_used_only_for_its_own_tensors(kit: Any, shared_engine: VllmEngine) -> None:
    staged, loaded = (kit.make_model("qwen2_tied", seed=seed) for seed in (8, 9))
    await shared_engine.load_weights(kit.version(0), kit.host_tensors(loaded))
    await shared_engine.stage_weights(kit.version(1), kit.host_tensors(staged))
    kit.perturb(loaded)
    digest = await shared_engine.load_weights(kit.version(1), kit.host_tensors(loaded))
    assert digest == held_digest(loaded, torch.float32)
    await assert_scores(kit, shared_engine, loaded)


async def test_a_prefix_of_older_weights_is_never_used(kit: Any, shared_engine: VllmEngine) -> None:
    model = kit.make_model("qwen2_tied", seed=4)
    prompt = [(5 * position + 1) % 90 for position in range(200)]
    request = GenerationRequest(prompt, kit.sampling(4), 1, 256)
    # The same version again, too: a learner that was restored may reuse a number.
    for step in (1, 2, 2):
        kit.perturb(model, 0.1)
        await shared_engine.load_weights(kit.version(step), kit.host_tensors(model))
        for _ in range(2):
            piece = await kit.complete(shared_engine, request)
            expected = kit.reference_logprobs(model, request, piece.token_ids)
            assert float((torch.tensor(piece.logprobs) - expected).abs().max()) < 1e-4
            assert piece.version == kit.version(step)


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


@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "bound"),
    [
        ("llama_untied", "float32", 1, 1e-4),
        ("gemma2_tied", "float32", 1, 1e-4),
        ("gemma3_tied", "float32", 1, 1e-4),
        ("qwen2_tied", "bfloat16", 1, 0.1),
        ("qwen2_tied", "float32", 2, 1e-4),
    ],
)
async def test_other_architectures_types_and_ranks(
    kit: Any, model_directory: Callable[[str], Path], name: str, dtype: str, ranks: int, bound: float
) -> None:
    torch_type = getattr(torch, dtype)
    shared_before = {path.name for path in Path("/dev/shm").glob("*cpushm*")}
    engine = await start_vllm_engine(
        ModelSection(path=str(model_directory(name)), dtype=dtype),  # type: ignore[arg-type]
        device="cpu",
        max_sequence_tokens=256,
        max_concurrent_sequences=16,
        options=VllmSection(tensor_parallel_size=ranks),
    )
    try:
        model = kit.make_model(name, seed=6).to(torch_type)
        assert dict(engine.layouts()) == layouts(model, torch_type)
        for step in (1, 2, 3):
            kit.perturb(model)
            tensors = kit.host_tensors(model)
            if step == 3:
                await engine.stage_weights(kit.version(step), tensors)
            digest = await engine.load_weights(kit.version(step), tensors)
            assert digest == held_digest(model, torch_type)
            assert await engine.held_digest() == digest
            requests = [
                GenerationRequest(PROMPT, kit.sampling(8, temperature=temperature), 3, 256)
                for temperature in (1.0, 0.7)
            ]
            for request in requests:
                piece = await kit.complete(engine, request)
                expected = kit.reference_logprobs(model, request, piece.token_ids)
                assert float((torch.tensor(piece.logprobs) - expected).abs().max()) < bound
    finally:
        await engine.close()
    assert {path.name for path in Path("/dev/shm").glob("*cpushm*")} <= shared_before
