"""The `transformers` engine: any causal language model that transformers loads, on CPU, CUDA or NPU."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from rollwire.rollout.engine import EngineDescription, GenerationError, GenerationRequest, Piece
from rollwire.rollout.engines.decode_loop import DecodeLoop, Outcome
from rollwire.rollout.engines.device_memory import DeviceMemory
from rollwire.rollout.engines.examine import choose_runner
from rollwire.rollout.engines.scheduler import Generation, Scheduler
from rollwire.rollout.engines.second_weights import SecondWeights
from rollwire.rpc.weight_stream import HostTensor, TensorLayout
from rollwire.serving.accelerator import Accelerator
from rollwire.serving.model_tensors import WIRE_TYPES, copy_all_in, held_digest, layouts
from rollwire.serving.server import ServeError
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

# A pass of this many tokens keeps a CPU's activations in its caches and a GPU busy.
_TOKENS_PER_PASS: Final = {"cpu": 512}
_TOKENS_PER_PASS_ACCELERATOR: Final = 8192
_KEEP_IDLE_S: Final = 1.0
_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Listener:
    """The receiving end of one generation; lives on the event loop.

    What waits here is bounded: a generation draws at most its length limit.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class TransformersEngine:
    """Continuous batching over a slot cache; see `Engine`.

    Must be created on the event loop that uses it.

    Args:
        model: A causal language model in evaluation mode, on its device.
        accelerator: Settings of the device.
        max_sequence_tokens: Longest sequence.
        max_concurrent_sequences: Sequences decoded together.

    Raises:
        ServeError: The model cannot hold sequences of that length.
    """

    def __init__(
        self, model: Any, accelerator: Accelerator, *, max_sequence_tokens: int, max_concurrent_sequences: int
    ) -> None:
        config = model.config.get_text_config()
        _check_positions(config, max_sequence_tokens)
        self._model = model
        self._memory = DeviceMemory(model)
        self._dtype: torch.dtype = model.dtype
        self._layouts = layouts(model, self._dtype)
        self._second = SecondWeights(model, self._dtype) if accelerator.device.type == "cpu" else None
        self._description = EngineDescription(
            name="transformers",
            architecture=type(model).__name__,
            device=accelerator.device.type,
            dtype=WIRE_TYPES[self._dtype],
            vocabulary_size=model.get_input_embeddings().weight.shape[0],
            max_sequence_tokens=max_sequence_tokens,
            max_concurrent_sequences=max_concurrent_sequences,
        )
        budget = _TOKENS_PER_PASS.get(accelerator.device.type, _TOKENS_PER_PASS_ACCELERATOR)
        scheduler = Scheduler(
            max_concurrent_sequences,
            max(budget, max_concurrent_sequences),
            one_sequence_per_pass=accelerator.deterministic,
            keep_idle_s=None if accelerator.deterministic else _KEEP_IDLE_S,
        )
        runner = choose_runner(model, max_concurrent_sequences, max_sequence_tokens)
        self._event_loop = asyncio.get_running_loop()
        self._listeners: dict[Generation, _Listener] = {}
        self._loop = DecodeLoop(runner, scheduler, accelerator.wide, self._deliver)
        self._loop.start()

    @property
    def description(self) -> EngineDescription:
        """See `Engine`."""
        return self._description

    @property
    def generated_tokens(self) -> int:
        """See `Engine`."""
        return self._loop.generated_tokens

    def layouts(self) -> Mapping[str, TensorLayout]:
        """See `Engine`."""
        return self._layouts

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """See `Engine`."""
        generation, listener = Generation(request), _Listener()
        self._listeners[generation] = listener
        self._loop.post(lambda: self._loop.submit(generation))
        ended = False
        try:
            while not ended:
                await listener.arrived.wait()
                listener.arrived.clear()
                outcomes, listener.outcomes = listener.outcomes, []
                for outcome in outcomes:
                    if isinstance(outcome, GenerationError):
                        ended = True
                        raise outcome
                    ended = outcome.stop_reason != trajectory_pb2.STOP_REASON_UNSPECIFIED
                    yield outcome
        finally:
            del self._listeners[generation]
            if not ended:
                self._loop.post(lambda: self._loop.abort(generation))

    def release(self, cache_key: str) -> None:
        """See `Engine`."""
        self._loop.post(lambda: self._loop.release(cache_key))

    async def abort_all(self) -> None:
        """See `Engine`."""
        await self._between_passes(self._loop.abort_all)

    async def stage_weights(
        self,
        version: weights_pb2.WeightVersion,
        tensors: Mapping[str, HostTensor],
        tensor_digests: Mapping[str, bytes] | None = None,
    ) -> None:
        """See `Engine`. Accelerators have no memory to spare for a second set of weights; the host has."""
        if self._second is not None:
            await asyncio.to_thread(self._second.fill, tensors)

    async def load_weights(
        self,
        version: weights_pb2.WeightVersion,
        tensors: Mapping[str, HostTensor],
        tensor_digests: Mapping[str, bytes] | None = None,
    ) -> bytes:
        """See `Engine`."""

        def load() -> bytes:
            self._loop.forget()
            digest = self._second.flip(tensors) if self._second is not None else None
            if digest is None:
                copy_all_in(self._model, tensors)
                digest = held_digest(self._model, self._dtype)
            self._loop.version = version
            return digest

        return await self._between_passes(load)

    async def held_digest(self) -> bytes:
        """See `Engine`."""
        return await self._between_passes(lambda: held_digest(self._model, self._dtype))

    @property
    def unverified(self) -> Sequence[str]:
        """See `Engine`."""
        return ()

    async def sleep(self, level: rollout_pb2.SleepLevel.ValueType) -> int:
        """See `Engine`."""

        def free() -> int:
            before = self._memory.allocated_bytes()
            self._loop.free()
            if self._second is not None:
                self._second.drop()
            self._memory.free(discard=level == rollout_pb2.SLEEP_LEVEL_DISCARD)
            return max(before - self._memory.allocated_bytes(), 0)

        return await self._between_passes(free)

    async def wake(self) -> None:
        """See `Engine`."""
        await self._between_passes(self._memory.take)

    async def failed(self) -> str:
        """See `Engine`."""
        await asyncio.wrap_future(self._loop.ended)
        return "the decoding thread has ended; restart the rollout server"

    async def close(self) -> None:
        """See `Engine`."""
        await asyncio.to_thread(self._loop.close)
        for listener in self._listeners.values():
            listener.outcomes.append(GenerationError("the engine was closed"))
            listener.arrived.set()

    async def _between_passes(self, work: Callable[[], _Result]) -> _Result:
        """Runs work in the decoding thread and returns its result; a caller that goes away does not stop it."""
        done: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        done.set_running_or_notify_cancel()  # else the thread would fail at reporting to a caller that was cancelled

        def execute() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # handed to the caller
                done.set_exception(error)

        self._loop.post(execute)
        return await asyncio.wrap_future(done)

    def _deliver(self, outcomes: list[tuple[Generation, Outcome]]) -> None:
        """Called by the decoding thread."""
        self._event_loop.call_soon_threadsafe(self._receive, outcomes)

    def _receive(self, outcomes: list[tuple[Generation, Outcome]]) -> None:
        for generation, outcome in outcomes:
            listener = self._listeners.get(generation)
            if listener is not None:
                listener.outcomes.append(outcome)
                listener.arrived.set()


def _check_positions(config: Any, max_sequence_tokens: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < max_sequence_tokens:
        raise ServeError(
            f"rollout.max_episode_tokens is {max_sequence_tokens}, but the model has only {positions} positions; "
            f"set rollout.max_episode_tokens to at most {positions}"
        )
