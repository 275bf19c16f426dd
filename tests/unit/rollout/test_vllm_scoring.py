"""Raw log-probabilities of the vllm engine, which take a second request, against a stand-in for `AsyncLLM`.

Whoever aborts everything may load other weights right afterwards: what was drawn is scored before, or given up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollwire.rollout.engine import EngineDescription, GenerationRequest, Piece, Sampling
from rollwire.rollout.engines.vllm_names import CheckpointNames
from rollwire.v1 import trajectory_pb2, weights_pb2

ABORTED, MAX_TOKENS = trajectory_pb2.STOP_REASON_ABORTED, trajectory_pb2.STOP_REASON_MAX_TOKENS
TOKENS = [4, 5, 6]
REQUEST = GenerationRequest(
    [1, 2], Sampling(0.5, 1.0, 0, len(TOKENS), frozenset({9}), trajectory_pb2.LOGPROB_MODE_RAW), 1, 60
)


class DeadError(Exception):
    """Stands in for vLLM's."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts stand-ins where Rollwire imports vLLM."""
    for name, contents in (
        ("vllm", {}),
        ("vllm.sampling_params", {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=1, DELTA=2), "SamplingParams": dict}),
        ("vllm.v1", {}),
        ("vllm.v1.engine", {}),
        ("vllm.v1.engine.exceptions", {"EngineDeadError": DeadError}),
    ):
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)


class FakeVllm:
    """An `AsyncLLM` whose requests end when the test says so, or when they are aborted after their first token."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.ends: dict[str, asyncio.Future[str]] = {}
        self.changed = asyncio.Event()
        self.deaf = False  # to aborts

    async def generate(
        self, prompt: Any, sampling_params: dict[str, Any], request_id: str
    ) -> AsyncGenerator[Any, None]:
        self.begun.append(sampling_params)
        self.ends[request_id] = asyncio.get_running_loop().create_future()
        self.changed.set()
        reason = await self.ends[request_id]
        tokens = TOKENS[:1] if reason == "abort" else TOKENS
        prompt = prompt["prompt_token_ids"]
        scores = [-float(token) for token in prompt] if "prompt_logprobs" in sampling_params else None
        completion = SimpleNamespace(
            token_ids=tokens, logprobs=SimpleNamespace(logprobs=[-1.0] * len(tokens)), finish_reason=reason
        )
        prompt_logprobs = None if scores is None else SimpleNamespace(logprobs=scores)
        yield SimpleNamespace(finished=True, outputs=[completion], prompt_logprobs=prompt_logprobs)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if not self.deaf and not self.ends[request_id].done():
                self.ends[request_id].set_result("abort")

    async def requests(self, count: int) -> list[asyncio.Future[str]]:
        """Waits for so many requests and returns how each ends."""
        while len(self.ends) < count:
            self.changed.clear()
            await self.changed.wait()
        return list(self.ends.values())


def engine(fake: FakeVllm) -> Any:
    from rollwire.rollout.engines.vllm_engine import VllmEngine

    description = EngineDescription("vllm", "X", "cpu", weights_pb2.DATA_TYPE_FLOAT32, 9, 64, 4)
    found = VllmEngine(fake, description, CheckpointNames("X", {}, {}), SimpleNamespace(failure=lambda: ""))  # type: ignore[arg-type]
    found._fault = ""  # as after a load
    return found


async def complete(found: Any) -> Piece:
    (piece,) = [piece async for piece in found.generate(REQUEST)]
    return piece


async def test_drawn_tokens_are_scored_by_a_second_request() -> None:
    fake = FakeVllm()
    generating = asyncio.create_task(complete(engine(fake)))
    (await fake.requests(1))[0].set_result("length")
    (await fake.requests(2))[1].set_result("length")
    piece = await generating
    assert (piece.token_ids, piece.logprobs, piece.stop_reason) == (TOKENS, [-4.0, -5.0, -6.0], MAX_TOKENS)


async def test_what_was_drawn_before_an_abort_is_scored_before_it_returns() -> None:
    fake = FakeVllm()
    found = engine(fake)
    drawing, scoring = (asyncio.create_task(complete(found)) for _ in range(2))
    (await fake.requests(2))[1].set_result("length")
    await fake.requests(3)
    aborting = asyncio.create_task(found.abort_all())
    requests = await fake.requests(4)
    assert requests[0].result() == "abort" and not requests[2].done() and not aborting.done()
    for request in requests[2:]:
        request.set_result("length")
    await aborting
    cut, whole = await drawing, await scoring
    assert (cut.token_ids, cut.logprobs, cut.stop_reason) == ([4], [-4.0], ABORTED)
    assert (whole.token_ids, whole.logprobs, whole.stop_reason) == (TOKENS, [-4.0, -5.0, -6.0], MAX_TOKENS)


@pytest.mark.parametrize("when", ["while it scores", "while it draws"])
async def test_what_an_abort_cannot_wait_for_is_given_up(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwire.rollout.engines.vllm_engine._ABORT_PATIENCE_S", 0.05)
    fake = FakeVllm()
    found = engine(fake)
    generating = asyncio.create_task(complete(found))
    (drawing,) = await fake.requests(1)
    if when == "while it scores":
        drawing.set_result("length")
        await fake.requests(2)
        await found.abort_all()
    else:
        fake.deaf = True
        await found.abort_all()
        drawing.set_result("length")
    begun = len(fake.begun)
    piece = await generating
    assert (piece.token_ids, piece.logprobs, piece.stop_reason) == ([], [], ABORTED)
    assert len(fake.begun) == begun, "other weights may have scored it"
    # The next generation is scored as ever.
    again = asyncio.create_task(complete(found))
    (await fake.requests(begun + 1))[begun].set_result("length")
    (await fake.requests(begun + 2))[begun + 1].set_result("length")
    assert (await again).logprobs == [-4.0, -5.0, -6.0]
