"""The bare engine of `rollwire bench rollout`, in a process of its own: no episodes, no environment, no gRPC, no text.

It has the settings of the rollout server's engine and the checkpoint's weights, which are the learner's version 0. The
`vllm` engine is vLLM's own `AsyncLLM`, without Rollwire's adapter.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

from rollwire.cli.bench_process import answer_commands
from rollwire.cli.bench_rollout_requests import RecordedEpisode
from rollwire.rollout.engine import GenerationRequest
from rollwire.serving.config import RunConfig
from rollwire.serving.logs import configure_logging

_CACHE_SALT: Final = "bench"

Drawn = list[list[list[list[int]]]]
"""Tokens of each turn of each episode of each group."""


@dataclass(frozen=True)
class Replay:
    """What came of a round of requests.

    Attributes:
        seconds: From the first request to the last token.
        drawn: The tokens.
    """

    seconds: float
    drawn: Drawn


class BareEngine(Protocol):
    """An engine as this benchmark drives it."""

    async def draw(self, request: GenerationRequest) -> list[int]:
        """Returns the tokens that continue a prompt."""

    def end(self, cache_key: str) -> None:
        """Ends the use of a prefix."""

    async def close(self) -> None:
        """Ends the engine."""


def run_bare_engine(pipe: Connection, config: RunConfig) -> None:
    """Runs the process: takes `start` and `replay`."""
    configure_logging("bare engine", level="WARNING")
    asyncio.run(_run(pipe, config))


async def replay(engine: BareEngine, groups: Sequence[Sequence[RecordedEpisode]], groups_at_once: int) -> Replay:
    """Makes the requests of whole groups, so many groups at once, the turns of an episode one after another."""
    free = asyncio.Semaphore(groups_at_once)

    async def play(episode: RecordedEpisode) -> list[list[int]]:
        drawn = [await engine.draw(turn.request) for turn in episode]
        engine.end(episode[0].request.cache_key)
        return drawn

    async def play_group(group: Sequence[RecordedEpisode]) -> list[list[list[int]]]:
        async with free:
            return await asyncio.gather(*map(play, group))

    start = time.perf_counter()
    drawn = await asyncio.gather(*map(play_group, groups))
    return Replay(time.perf_counter() - start, drawn)


async def _run(pipe: Connection, config: RunConfig) -> None:
    engines: list[BareEngine] = []

    async def start() -> None:
        engines.append(await _STARTERS[config.rollout.engine](config))
        gc.collect()
        gc.freeze()  # as servers do

    async def answer(groups: Sequence[Sequence[RecordedEpisode]], groups_at_once: int) -> Replay:
        return await replay(engines[0], groups, groups_at_once)

    try:
        await answer_commands(pipe, {"start": start, "replay": answer})
    finally:
        gc.unfreeze()
        for engine in engines:
            await engine.close()


class _Transformers:
    """Rollwire's own engine, as the rollout server drives it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def draw(self, request: GenerationRequest) -> list[int]:
        return [token async for piece in self._engine.generate(request) for token in piece.token_ids]

    def end(self, cache_key: str) -> None:
        self._engine.release(cache_key)

    async def close(self) -> None:
        await self._engine.close()


async def _start_transformers(config: RunConfig) -> BareEngine:
    from rollwire.rollout.engines.choose import start_engine

    return _Transformers((await start_engine(config)).engine)


class _Vllm:
    """VLLM's `AsyncLLM`, with the arguments that Rollwire's adapter gives it."""

    def __init__(self, engine: Any) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._engine = engine
        self._parameters: Callable[..., Any] = SamplingParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._number = 0

    async def draw(self, request: GenerationRequest) -> list[int]:
        from rollwire.rollout.engines.vllm_requests import sampling_arguments

        self._number += 1
        parameters = self._parameters(**sampling_arguments(request), output_kind=self._final_only)
        prompt = {"type": "token", "prompt_token_ids": request.token_ids, "cache_salt": _CACHE_SALT}
        drawn: list[int] = []
        async for output in self._engine.generate(
            prompt=prompt, sampling_params=parameters, request_id=str(self._number)
        ):
            drawn = list(output.outputs[0].token_ids)
        return drawn

    def end(self, cache_key: str) -> None:
        """Nothing: vLLM drops the prefixes that were unused longest."""

    async def close(self) -> None:
        from rollwire.rollout.engines.vllm_process import stop_vllm

        self._engine.output_handler.cancel()
        await asyncio.to_thread(stop_vllm, self._engine)


async def _start_vllm(config: RunConfig) -> BareEngine:
    from transformers import AutoConfig

    from rollwire.rollout.engines.vllm_process import EngineOutput, start_vllm
    from rollwire.rollout.engines.vllm_settings import EngineRequest, choose, kv_bytes_per_token
    from rollwire.serving.accelerator import select_device
    from rollwire.serving.model_files import model_source
    from rollwire.serving.model_tensors import SERVING_TYPES

    rollout, source = config.rollout, model_source(config.model)
    text_config = AutoConfig.from_pretrained(source).get_text_config()
    element_bytes = SERVING_TYPES[config.model.dtype].itemsize
    request = EngineRequest(
        model=source,
        dtype=config.model.dtype,
        device=select_device(config.device).type,
        max_sequence_tokens=rollout.max_episode_tokens,
        max_concurrent_sequences=rollout.max_concurrent_sequences,
        torch_threads=rollout.torch_threads,
        deterministic=config.run.deterministic,
        kv_bytes_per_token=kv_bytes_per_token(text_config, element_bytes, rollout.vllm.tensor_parallel_size),
    )
    settings = choose(request, rollout.vllm)
    # The servers' engine gets its weights from the learner, which read the same file.
    settings = replace(settings, arguments=settings.arguments | {"load_format": "auto"})
    engine, _ = await asyncio.to_thread(start_vllm, settings, request.device, EngineOutput())
    return _Vllm(engine)


_STARTERS: Final[dict[str, Callable[[RunConfig], Awaitable[BareEngine]]]] = {
    "transformers": _start_transformers,
    "vllm": _start_vllm,
}
