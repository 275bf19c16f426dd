"""Reloading weights: all of them, a few, twice in a row, tied and untied heads; nothing older is ever used again."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import engine_kit as kit
import pytest

from rollwire.rollout.engine import GenerationRequest
from rollwire.rpc.digests import tensor_digest, weights_digest
from rollwire.serving.model_tensors import SERVING_TYPES, held_digest, layouts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPT = [(5 * position + 1) % 90 for position in range(200)]
MODELS = ["qwen2_tied", "llama_untied", kit.BUILTIN]


async def assert_serves(subject: Any) -> None:
    """Asserts that the engine computes with the model's weights, after a prompt that it may have seen before."""
    asked = [GenerationRequest(PROMPT, kit.sampling(6, temperature=t), 1, kit.MAX_TOKENS) for t in (1.0, 0.7)]
    for request in [*asked, asked[0]]:
        piece = await kit.complete(subject.engine, request)
        assert kit.gap(subject.model, request, piece) < subject.bound
        assert piece.version == subject.version


def sent_digest(subject: Any) -> bytes:
    """Returns the digest of the weights as they travel."""
    tensors = kit.host_tensors(subject.model, dtype=SERVING_TYPES[subject.dtype])
    return weights_digest((name, tensor_digest(tensor.data)) for name, tensor in tensors.items())


@pytest.mark.parametrize("model_name", MODELS)
async def test_names_and_layouts_are_the_learners(subject: Any) -> None:
    assert dict(subject.engine.layouts()) == layouts(subject.model, SERVING_TYPES[subject.dtype])


@pytest.mark.parametrize(("model_name", "dtype"), [*((name, "float32") for name in MODELS), ("qwen2_tied", "bfloat16")])
async def test_all_weights_twice_in_a_row(subject: Any) -> None:
    """Tied: one tensor for embedding and head. Untied: the head moves by itself."""
    for _ in range(3):
        kit.perturb(subject.model)
        digest = await subject.load()
        assert digest == sent_digest(subject) == await subject.engine.held_digest()
        if subject.dtype == "float32":
            assert digest == held_digest(subject.model, SERVING_TYPES[subject.dtype])
            await assert_serves(subject)


@pytest.mark.parametrize(
    ("model_name", "only"),
    [
        ("qwen2_tied", "layers.1.self_attn.q_proj"),
        ("qwen2_tied", "layers.0.mlp.up_proj"),
        ("qwen2_tied", "embed_tokens"),
        ("qwen2_tied", "norm"),
        ("qwen2_tied", "bias"),
        ("llama_untied", "embed_tokens"),
        ("llama_untied", "lm_head"),
        (kit.BUILTIN, "layers.4"),
    ],
)
async def test_only_some_tensors_changed(subject: Any, only: str) -> None:
    await assert_serves(subject)
    before = sent_digest(subject)
    kit.perturb(subject.model, 0.1, only)
    assert before != await subject.load() == sent_digest(subject)
    await assert_serves(subject)


async def test_a_prefix_of_older_weights_is_never_used(subject: Any) -> None:
    """The same version again, too: a learner that was restored may reuse a number."""
    request = GenerationRequest(PROMPT, kit.sampling(4), 1, kit.MAX_TOKENS, "kept-over-a-reload")
    for step in (0, 1, 1):
        kit.perturb(subject.model, 0.1)
        subject.step = step
        await subject.load()
        for _ in range(2):
            piece = await kit.complete(subject.engine, request)
            assert kit.gap(subject.model, request, piece) < subject.bound
            assert piece.version == subject.version
    subject.engine.release("kept-over-a-reload")


async def test_back_to_the_weights_of_before(subject: Any) -> None:
    first, request = copy.deepcopy(subject.model), GenerationRequest(PROMPT, kit.sampling(12), 7, kit.MAX_TOKENS)
    piece = await kit.complete(subject.engine, request)
    kit.perturb(subject.model, 0.1)
    await subject.load()
    other = await kit.complete(subject.engine, request)
    assert other.token_ids != piece.token_ids
    subject.model = first
    await subject.load()
    again = await kit.complete(subject.engine, request)
    assert again.token_ids == piece.token_ids
    assert again.logprobs == pytest.approx(piece.logprobs, abs=subject.bound)


async def test_staging_while_generating_changes_nothing_until_the_load(subject: Any) -> None:
    for round_ in range(3):
        old, held = copy.deepcopy(subject.model), await subject.engine.held_digest()
        request = GenerationRequest(PROMPT[:41], kit.sampling(60), round_, kit.MAX_TOKENS)
        running = [asyncio.create_task(kit.complete(subject.engine, request)) for _ in range(4)]
        await asyncio.sleep(0.02)
        kit.perturb(subject.model, 0.05)
        tensors, version = kit.host_tensors(subject.model), kit.version(subject.step + 1)
        await subject.engine.stage_weights(version, tensors)
        running.append(asyncio.create_task(kit.complete(subject.engine, request)))
        for piece in await asyncio.gather(*running):
            assert kit.gap(old, request, piece) < subject.bound
            assert piece.version == subject.version
        assert await subject.engine.held_digest() == held
        assert await subject.engine.load_weights(version, tensors) == sent_digest(subject)
        subject.step += 1
        assert await subject.engine.held_digest() == sent_digest(subject)
        await assert_serves(subject)


async def test_what_was_staged_is_used_only_for_its_own_tensors(subject: Any) -> None:
    staged = kit.make_model("qwen2_tied", seed=8)
    await subject.engine.stage_weights(kit.version(2), kit.host_tensors(staged))
    kit.perturb(subject.model)
    assert await subject.load() == sent_digest(subject)
    await assert_serves(subject)
