"""The engine against plain forward passes: mixed lengths, many turns, admission in flight, slots used again."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from rollwire.rollout.engine import GenerationError, GenerationRequest, Piece, Sampling
from rollwire.rollout.engines.runners import PackedRunner, PlainRunner
from rollwire.rollout.engines.transformers_engine import TransformersEngine
from rollwire.serving.accelerator import prepare
from rollwire.serving.model_tensors import held_digest, named_weights, to_host
from rollwire.serving.server import ServeError
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

SAMPLED = trajectory_pb2.LOGPROB_MODE_SAMPLED
VERSION = weights_pb2.WeightVersion(lineage="main", step=3)


def sampling(max_tokens: int = 5, **changes: Any) -> Sampling:
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": frozenset({2})}
    return Sampling(**{**settings, **changes}, max_tokens=max_tokens, logprob_mode=SAMPLED)


@asynccontextmanager
async def running(
    model: Any, slots: int = 4, max_tokens: int = 128, *, deterministic: bool = False
) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(
        copy.deepcopy(model),
        prepare(device="cpu", deterministic=deterministic),
        max_sequence_tokens=max_tokens,
        max_concurrent_sequences=slots,
    )
    try:
        yield engine
    finally:
        await engine.close()
        torch.use_deterministic_algorithms(False)


async def complete(engine: TransformersEngine, request: GenerationRequest) -> Piece:
    pieces = [piece async for piece in engine.generate(request)]
    assert len(pieces) == 1
    return pieces[0]


async def play(
    engine: TransformersEngine, seed: int, turns: int, *, jitter_s: float = 0.0, **changes: Any
) -> list[tuple[list[int], Piece]]:
    """Plays an episode of random prompts; returns each turn's prompt and response."""
    randomness = random.Random(seed)
    tokens = [randomness.randrange(3, 97) for _ in range(randomness.randrange(1, 20))]
    played = []
    for turn in range(turns):
        await asyncio.sleep(random.random() * jitter_s)
        request = GenerationRequest(
            tokens, sampling(randomness.randrange(1, 6), **changes), seed * 1000 + turn, 120, f"episode-{seed}"
        )
        piece = await complete(engine, request)
        played.append((tokens, piece))
        tokens = [*tokens, *piece.token_ids, *(randomness.randrange(3, 97) for _ in range(randomness.randrange(1, 9)))]
    engine.release(f"episode-{seed}")
    return played


@pytest.mark.parametrize(
    ("name", "runner"),
    [
        ("qwen2", PackedRunner),
        ("llama", PackedRunner),
        ("gpt2", PackedRunner),
        ("gemma", PackedRunner),
        ("mistral_window", PackedRunner),
        ("gemma2_softcap", PlainRunner),
        ("mamba", PlainRunner),
    ],
)
async def test_log_probabilities_are_those_of_a_plain_forward_pass(
    name: str, runner: type, make_model: Callable[..., Any], plain_logprobs: Callable[..., list[float]]
) -> None:
    model = make_model(name)
    async with running(model, slots=3) as engine:
        assert type(engine._loop._runner) is runner
        # More episodes than slots, each admitted while others run.
        episodes = await asyncio.gather(*(play(engine, seed, turns=4, jitter_s=0.01) for seed in range(8)))
    worst = 0.0
    for episode in episodes:
        for prompt, piece in episode:
            expected = plain_logprobs(model, prompt + piece.token_ids, len(prompt))
            worst = max(worst, *(abs(a - b) for a, b in zip(piece.logprobs, expected, strict=True)))
    assert worst < 1e-4


async def test_bfloat16_differs_by_its_rounding_alone(
    make_model: Callable[..., Any], plain_logprobs: Callable[..., list[float]]
) -> None:
    model = make_model().to(torch.bfloat16)
    async with running(model, slots=4) as engine:
        assert isinstance(engine._loop._runner, PackedRunner)
        episodes = await asyncio.gather(*(play(engine, seed, turns=3) for seed in range(6)))
    for episode in episodes:
        for prompt, piece in episode:
            expected = plain_logprobs(model, prompt + piece.token_ids, len(prompt))
            assert piece.logprobs == pytest.approx(expected, abs=0.3)


async def test_decoding_rows_together_gives_the_same(
    make_model: Callable[..., Any], plain_logprobs: Callable[..., list[float]]
) -> None:
    for name in ("qwen2", "mistral_window"):
        model = make_model(name)
        async with running(model, slots=6) as engine:
            runner = engine._loop._runner
            assert isinstance(runner, PackedRunner)
            runner._gather_decoding = True  # as on a GPU
            episodes = await asyncio.gather(*(play(engine, seed, turns=3) for seed in range(6)))
        for episode in episodes:
            for prompt, piece in episode:
                expected = plain_logprobs(model, prompt + piece.token_ids, len(prompt))
                assert piece.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_result_does_not_depend_on_what_else_runs(make_model: Callable[..., Any]) -> None:
    model = make_model()
    async with running(model, slots=8) as engine:
        crowd = await asyncio.gather(*(play(engine, seed, turns=3, jitter_s=0.005) for seed in range(8)))
    async with running(model, slots=1) as engine:
        assert isinstance(engine._loop._runner, PackedRunner)
        alone = [await play(engine, seed, turns=3) for seed in range(8)]
    assert [[piece.token_ids for _, piece in episode] for episode in crowd] == [
        [piece.token_ids for _, piece in episode] for episode in alone
    ]


async def test_deterministic_runs_are_equal_bit_for_bit_whatever_the_timing(make_model: Callable[..., Any]) -> None:
    model = make_model()
    runs = []
    for slots, jitter_s in ((8, 0.0), (2, 0.02)):
        async with running(model, slots=slots, deterministic=True) as engine:
            assert isinstance(engine._loop._runner, PackedRunner)
            order = list(range(8))
            random.shuffle(order)
            tasks = {seed: asyncio.create_task(play(engine, seed, turns=4, jitter_s=jitter_s)) for seed in order}
            await asyncio.gather(*tasks.values())
        runs.append([[(piece.token_ids, piece.logprobs) for _, piece in tasks[seed].result()] for seed in range(8)])
    assert runs[0] == runs[1]


async def test_streaming_gives_the_same_tokens_one_by_one(make_model: Callable[..., Any]) -> None:
    async with running(make_model()) as engine:
        whole = await complete(engine, GenerationRequest([5, 6, 7], sampling(20, stop_token_ids=frozenset()), 9, 100))
        streamed = [
            piece
            async for piece in engine.generate(
                GenerationRequest([5, 6, 7], sampling(20, stop_token_ids=frozenset()), 9, 100, stream=True)
            )
        ]
    assert [token for piece in streamed for token in piece.token_ids] == whole.token_ids
    assert len(streamed) > 1
    assert all(piece.stop_reason == trajectory_pb2.STOP_REASON_UNSPECIFIED for piece in streamed[:-1])
    assert streamed[-1].stop_reason == whole.stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS
    assert engine.generated_tokens == 40


async def test_greedy_is_the_argmax_of_the_model(make_model: Callable[..., Any]) -> None:
    model = make_model("llama")
    async with running(model) as engine:
        piece = await complete(engine, GenerationRequest([5, 6, 7], sampling(6, temperature=0.0), 0, 100))
    tokens = [5, 6, 7]
    with torch.inference_mode():
        for token in piece.token_ids:
            assert token == int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            tokens.append(token)


async def test_closing_the_iterator_aborts_and_frees_the_slot(make_model: Callable[..., Any]) -> None:
    async with running(make_model(), slots=1, max_tokens=128) as engine:
        stream = engine.generate(GenerationRequest([5], sampling(100, stop_token_ids=frozenset()), 0, 120, stream=True))
        await anext(stream)
        await stream.aclose()
        piece = await asyncio.wait_for(complete(engine, GenerationRequest([6], sampling(2), 1, 100)), 30)
        assert piece.token_ids
        assert engine.generated_tokens < 100


async def test_abort_all_ends_running_and_waiting_generations(make_model: Callable[..., Any]) -> None:
    async with running(make_model(), slots=1, max_tokens=128) as engine:
        request = GenerationRequest([5], sampling(120, stop_token_ids=frozenset()), 0, 128)
        tasks = [asyncio.create_task(complete(engine, request)) for _ in range(3)]
        while engine.generated_tokens == 0:
            await asyncio.sleep(0.001)
        await engine.abort_all()
        pieces = await asyncio.gather(*tasks)
    assert {piece.stop_reason for piece in pieces} == {trajectory_pb2.STOP_REASON_ABORTED}
    assert len(pieces[0].token_ids) >= 1 and pieces[2].token_ids == []


def wire(model: Any) -> dict[str, Any]:
    return {name: to_host(tensor, torch.float32) for name, tensor in named_weights(model)}


async def test_new_weights_replace_the_old_ones_completely(
    make_model: Callable[..., Any], plain_logprobs: Callable[..., list[float]]
) -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    async with running(old) as engine:
        before = await complete(engine, GenerationRequest([5, 6, 7], sampling(), 1, 100, "key"))
        assert set(wire(new)) == set(engine.layouts())
        digest = await engine.load_weights(VERSION, wire(new))
        assert digest == held_digest(new, torch.float32) != held_digest(old, torch.float32)
        # The key still names a prefix that the old weights computed: it must not be used.
        prompt = [5, 6, 7, *before.token_ids, 8]
        after = await complete(engine, GenerationRequest(prompt, sampling(), 2, 100, "key"))
        assert engine._model.lm_head.weight is engine._model.model.embed_tokens.weight
    assert before.version == weights_pb2.WeightVersion() and after.version == VERSION
    expected = plain_logprobs(new, prompt + after.token_ids, len(prompt))
    assert after.logprobs == pytest.approx(expected, abs=1e-4)


async def test_staged_weights_change_nothing_until_they_are_loaded(
    make_model: Callable[..., Any], plain_logprobs: Callable[..., list[float]]
) -> None:
    old = make_model(seed=0)
    async with running(old, max_tokens=128) as engine:
        for seed in (1, 2, 3):  # the memory of each set is used again for the one after the next
            new, serving = make_model(seed=seed), await engine.held_digest()
            tensors = wire(new)
            stream = engine.generate(
                GenerationRequest([5], sampling(100, stop_token_ids=frozenset()), 0, 120, stream=True)
            )
            await anext(stream)
            await engine.stage_weights(VERSION, tensors)
            await anext(stream)
            await stream.aclose()
            assert await engine.held_digest() == serving
            assert await engine.load_weights(VERSION, tensors) == held_digest(new, torch.float32)
            assert await engine.held_digest() == held_digest(new, torch.float32)
            assert engine._model.lm_head.weight is engine._model.model.embed_tokens.weight
            piece = await complete(engine, GenerationRequest([5, 6, 7], sampling(), 1, 100))
            expected = plain_logprobs(new, [5, 6, 7, *piece.token_ids], 3)
            assert piece.logprobs == pytest.approx(expected, abs=1e-4)


async def test_other_tensors_than_the_staged_ones_are_loaded_as_well(make_model: Callable[..., Any]) -> None:
    async with running(make_model(seed=0)) as engine:
        await engine.stage_weights(VERSION, wire(make_model(seed=1)))
        other = make_model(seed=2)
        assert await engine.load_weights(VERSION, wire(other)) == held_digest(other, torch.float32)
        assert await engine.held_digest() == held_digest(other, torch.float32)
        tensors = wire(make_model(seed=3))
        await engine.stage_weights(VERSION, tensors)
        await engine.sleep(rollout_pb2.SLEEP_LEVEL_DISCARD)
        await engine.wake()
        await engine.load_weights(VERSION, tensors)
        assert await engine.held_digest() == held_digest(make_model(seed=3), torch.float32)


async def test_weights_do_not_change_under_a_running_generation(make_model: Callable[..., Any]) -> None:
    model = make_model()
    async with running(model) as engine:
        stream = engine.generate(GenerationRequest([5], sampling(110, stop_token_ids=frozenset()), 0, 120, stream=True))
        await anext(stream)
        with pytest.raises(RuntimeError, match="nothing is generated"):
            await engine.load_weights(VERSION, wire(model))
        await stream.aclose()


async def test_logits_that_are_not_finite_fail_the_generation_and_not_the_engine(
    make_model: Callable[..., Any],
) -> None:
    good, broken = make_model(), make_model()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    async with running(good) as engine:
        await engine.load_weights(VERSION, wire(broken))
        with pytest.raises(GenerationError, match="not finite"):
            await complete(engine, GenerationRequest([5], sampling(), 0, 100))
        await engine.load_weights(VERSION, wire(good))
        assert (await complete(engine, GenerationRequest([5], sampling(), 0, 100))).token_ids


async def test_a_fault_of_the_device_fails_the_generations_of_the_pass(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_model()) as engine:
        runner = engine._loop._runner

        def fail(chunks: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(runner, "logits", fail)
            with pytest.raises(GenerationError, match="OutOfMemoryError"):
                await complete(engine, GenerationRequest([5], sampling(), 0, 100))
        assert (await complete(engine, GenerationRequest([5], sampling(), 0, 100))).token_ids


async def test_a_model_with_too_few_positions_is_refused(make_model: Callable[..., Any]) -> None:
    with pytest.raises(ServeError, match=r"max_episode_tokens is 4096.*128 positions"):
        TransformersEngine(make_model(), prepare(device="cpu"), max_sequence_tokens=4096, max_concurrent_sequences=2)


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_caller_that_goes_away_does_not_end_the_decoding_thread(
    make_model: Callable[..., Any], cancelled: bool
) -> None:
    async with running(make_model()) as engine:
        may_go_on = threading.Event()
        engine._loop.post(may_go_on.wait)  # type: ignore[arg-type]
        waiting = asyncio.create_task(engine.abort_all())
        await asyncio.sleep(0)  # it has asked the thread, which is busy
        if cancelled:
            waiting.cancel()
        await asyncio.sleep(0)
        assert waiting.done() == cancelled
        may_go_on.set()
        async with asyncio.timeout(30):
            await engine.held_digest()
        await asyncio.wait([waiting])
        assert waiting.cancelled() == cancelled
