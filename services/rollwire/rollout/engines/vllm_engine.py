"""The `vllm` engine: continuous batching, paged attention and prefix cache of vLLM 0.23 to 0.32, in own processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import torch

from rollwire.rollout.engine import EngineDescription, GenerationError, GenerationRequest, Piece, Sampling
from rollwire.rollout.engines.vllm_names import CheckpointNames
from rollwire.rollout.engines.vllm_process import EngineOutput, one_line, stop_vllm
from rollwire.rollout.engines.vllm_requests import drawn_logprobs, needs_scoring, sampling_arguments, stop_reason
from rollwire.rollout.engines.vllm_weights import WeightsNotHeldError, check_reports, wire_entries
from rollwire.rollout.host_file import HostFile
from rollwire.rpc.digests import tensor_digest, weights_digest
from rollwire.rpc.errors import Reason, RollwireError, exhausted
from rollwire.rpc.limits import MIB
from rollwire.rpc.memory_file import HostMemoryError
from rollwire.rpc.versions import version_text
from rollwire.rpc.weight_stream import HostTensor, TensorLayout
from rollwire.serving.logs import get_logger
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

_log = get_logger(__name__)
LOAD_TIMEOUT_S: Final = 600.0
"""Longest time that vLLM's workers may take to load weights."""
_ABORT_PATIENCE_S: Final = 3.0
_ABORT_INTERVAL_S: Final = 0.1
_HEALTH_INTERVAL_S: Final = 1.0
_MEMORY_RETRY_S: Final = 5.0
_ABORTED: Final = trajectory_pb2.STOP_REASON_ABORTED
_STAGING_DEVICES: Final = ("cpu",)
_VLLM_LEVELS: Final = {rollout_pb2.SLEEP_LEVEL_HOST: 1, rollout_pb2.SLEEP_LEVEL_DISCARD: 2}
# Waking, vllm-ascend 0.23 turns the weights of experts round once more: the model then talks nonsense without an error.
_EXPERTS_DO_NOT_SLEEP: Final = (
    "this rollout server cannot free its device: vllm-ascend wakes models with experts wrongly; use a dense model, or "
    "give rollout server and learner devices of their own"
)
# Generation waits for one slice at a time; a large tensor takes longer than that.
_STAGE_SLICE_S: Final = 0.005


@dataclass(frozen=True)
class _Staged:
    """A second set of weights in the engine: the tensors it was made from, and their digests."""

    tensors: Mapping[str, HostTensor]
    tensor_digests: dict[str, bytes]


class VllmEngine:
    """An `AsyncLLM` behind the `Engine` protocol; made by `start_vllm_engine`.

    Args:
        engine: The running `AsyncLLM`.
        description: The engine's facts.
        names: The model's weights.
        output: What vLLM's processes print.
    """

    def __init__(
        self, engine: Any, description: EngineDescription, names: CheckpointNames, output: EngineOutput
    ) -> None:
        # Not importable where another engine serves.
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self._engine = engine
        self._description = description
        self._names = names
        self._output = output
        self._sampling_params = SamplingParams
        self._final_only, self._delta = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
        self._dead_error = EngineDeadError
        self._numbers = itertools.count()
        self._aborts = 0  # how often `abort_all` has returned
        self._running: set[str] = set()
        self._scoring: set[str] = set()  # those of them that score what was drawn
        self._none_running = asyncio.Event()
        self._none_running.set()
        self._version = weights_pb2.WeightVersion()
        self._digests: dict[str, bytes] = {}
        self._unverified: list[str] = []
        self._staged: _Staged | None = None
        self._staging_refused = False
        self._slept_bytes: list[int] = []
        self._lost = False
        self._fault = "the engine has no weights yet"
        self._generated_tokens = 0

    @property
    def description(self) -> EngineDescription:
        """See `Engine`."""
        return self._description

    @property
    def generated_tokens(self) -> int:
        """See `Engine`."""
        return self._generated_tokens

    def layouts(self) -> Mapping[str, TensorLayout]:
        """See `Engine`."""
        return self._names.layouts

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """See `Engine`."""
        if self._fault:
            raise GenerationError(self._fault)
        arguments = sampling_arguments(request)
        scoring = needs_scoring(request.sampling)
        arguments["output_kind"] = self._delta if request.stream and not scoring else self._final_only
        version, aborts = self._version, self._aborts
        drawn: list[int] = []
        async with aclosing(self._outputs(request.token_ids, arguments, version)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                token_ids = list(completion.token_ids)
                drawn += token_ids
                self._generated_tokens += len(token_ids)
                ended = trajectory_pb2.STOP_REASON_UNSPECIFIED
                if output.finished:
                    ended = stop_reason(request, drawn, completion.finish_reason)
                logprobs = drawn_logprobs(request.sampling, completion)
                if scoring and drawn:
                    scored = await self._raw_logprobs(request, drawn, version, aborts)
                    token_ids, logprobs, ended = ([], [], _ABORTED) if scored is None else (token_ids, scored, ended)
                yield Piece(token_ids, logprobs, version, ended)

    def release(self, cache_key: str) -> None:
        """See `Engine`. vLLM finds prefixes by their tokens and drops those that were unused longest."""

    async def abort_all(self) -> None:
        """See `Engine`."""
        # A generation that vLLM has not registered yet is not aborted, so it is asked again. One whose receiver has
        # stopped reading has ended although its iterator has not; such receivers are not waited for. What was drawn is
        # still scored: only the version that drew it can do that.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_PATIENCE_S):
                while self._running:
                    await self._engine.abort(list(self._running - self._scoring))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_INTERVAL_S):
                            await self._none_running.wait()
        self._aborts += 1
        if self._scoring:
            await self._engine.abort(list(self._scoring))

    async def stage_weights(
        self,
        version: weights_pb2.WeightVersion,
        tensors: Mapping[str, HostTensor],
        tensor_digests: Mapping[str, bytes] | None = None,
    ) -> None:
        """Makes a second set of weights in the engine while it generates, so that `load_weights` only has to switch.

        Optional, and without effect where it is not possible: on accelerators, which have no memory to spare, before
        the first load, and for models whose loader computes with the tensors. Arguments as for `load_weights`, which
        must then be given the same `tensors` object.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `HOST_MEMORY_EXHAUSTED`; INTERNAL / `INTERNAL`: what was staged differs
                from what was sent. The active weights are not affected.
        """
        self._staged = None
        if self._description.device not in _STAGING_DEVICES or not self._digests or self._staging_refused:
            return
        file = await _in_shared_memory(lambda: HostFile.around(tensors))
        digests = dict(tensor_digests) if tensor_digests is not None else await asyncio.to_thread(_tensor_digests, file)
        complete = tensors.keys() >= self._names.layouts.keys()
        await self._call("rl_stage", file.path, wire_entries(file.entries), complete)
        reports: list[dict[str, Any]] = []
        while not reports or not all(report["done"] for report in reports):  # ranks do not proceed alike
            reports = await self._call("rl_stage_some", _STAGE_SLICE_S)
        refusals = [report["refused"] for report in reports if report["refused"]]
        differing = sorted({name for report in reports for name in report["differing"]})
        if refusals or differing:
            await self._call("rl_drop")
        if differing:
            raise _internal(f"staging {version_text(version)} failed: {differing[:3]} differ from what was sent")
        if refusals:
            self._staging_refused = True
            _log.warning("weights cannot be staged, updates pause generation for longer", reason=refusals[0])
            return
        self._staged = _Staged(tensors, digests)

    async def load_weights(
        self,
        version: weights_pb2.WeightVersion,
        tensors: Mapping[str, HostTensor],
        tensor_digests: Mapping[str, bytes] | None = None,
    ) -> bytes:
        """See `Engine`. A part of the tensors may be given; the others keep their values.

        Tensors in `shared_memory` are mapped by the engine's processes, others are copied into a file of their own
        first. The digest is that of the tensors sent; that it is also the digest of what the engine holds is
        established by the workers, which compare every tensor bit for bit after copying it in.

        Args:
            version: Version that the weights are from now on.
            tensors: The tensors.
            tensor_digests: `TensorSpec.digest` (32 bytes) of each tensor, if it is known.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `HOST_MEMORY_EXHAUSTED`: there is no memory for the hand-over.
                INTERNAL / `INTERNAL`: the engine does not hold what it was sent; nothing is generated until a load of
                all tensors succeeds.
        """
        complete = tensors.keys() >= self._names.layouts.keys()
        if not complete and not self._digests:
            raise _internal(f"{len(tensors)} of {len(self._names.layouts)} tensors, and the engine has no weights")
        staged, self._staged = self._staged, None
        if staged is not None and staged.tensors is not tensors:
            staged = None
        file = await _in_shared_memory(lambda: HostFile.around(tensors)) if staged is None else None
        kept, self._digests = self._digests, {}
        self._fault = f"loading {version_text(version)} has not ended"
        try:
            if file is not None:
                digests, unverified = await self._load(file, tensor_digests, complete)
            else:
                assert staged is not None
                await self._call("rl_flip")
                digests, unverified = staged.tensor_digests, []
        except (WeightsNotHeldError, RollwireError) as error:
            cause = error.message if isinstance(error, RollwireError) else str(error)
            self._fault = f"loading {version_text(version)} failed: {cause}"
            raise _internal(self._fault) from error
        await self._answer("reset_prefix_cache", self._engine.reset_prefix_cache())
        self._digests = kept | digests
        if complete and unverified != self._unverified:
            _log.warning("some tensors cannot be read back from vllm", names=unverified[:10], number=len(unverified))
        self._unverified = unverified if complete else sorted({*self._unverified, *unverified})
        self._version = weights_pb2.WeightVersion()
        self._version.CopyFrom(version)
        self._fault = ""
        return weights_digest(self._digests.items())

    async def held_digest(self) -> bytes:
        """Returns `WeightManifest.digest` (32 bytes) of what the engine holds, by reading every tensor back from it.

        Tensors that vLLM's loader transforms cannot be read back; for these, what was sent counts.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `HOST_MEMORY_EXHAUSTED`; INTERNAL / `INTERNAL`: the engine has died.
        """
        sent = {name: self._digests[name] for name in self._unverified}  # a load that comes meanwhile forgets them
        file = await _in_shared_memory(lambda: HostFile.empty(self._names.layouts))
        await self._call("rl_read_back", file.path, wire_entries(file.entries))
        digests = await asyncio.to_thread(_tensor_digests, file)
        return weights_digest((digests | sent).items())

    async def sleep(self, level: rollout_pb2.SleepLevel.ValueType) -> int:
        """See `Engine`. What vLLM keeps in host memory it keeps until it wakes, whatever follows."""
        if level == rollout_pb2.SLEEP_LEVEL_DISCARD:
            self._digests, self._fault = {}, "the weights were dropped"
        if self._description.device == "cpu":
            await self._answer("reset_prefix_cache", self._engine.reset_prefix_cache())
            return 0
        if self._slept_bytes:
            return 0
        before = await self._call("rl_free_bytes")
        await self._whole("falling asleep", self._engine.sleep(level=_VLLM_LEVELS[level], mode="abort"))
        after = await self._call("rl_free_bytes")
        self._slept_bytes = [max(more - less, 1) for less, more in zip(before, after, strict=True)]
        return sum(self._slept_bytes)

    async def wake(self) -> None:
        """See `Engine`."""
        if not self._slept_bytes:
            return
        # vLLM takes the memory piece by piece and cannot go back when there is no more.
        free = await self._call("rl_free_bytes")
        for rank, (wanted, found) in enumerate(zip(self._slept_bytes, free, strict=True)):
            if found < wanted:
                raise torch.OutOfMemoryError(
                    f"rank {rank} needs {wanted // MIB} MiB of the device's memory, {found // MIB} MiB are free"
                )
        await self._whole("waking", self._engine.wake_up())
        self._slept_bytes = []

    @property
    def unverified(self) -> Sequence[str]:
        """See `Engine`: those that vLLM's loader transforms."""
        return self._unverified

    async def prepare(self) -> str:
        """Sets up the workers, and draws a token with whatever weights there are.

        An architecture that vLLM cannot compute shows only then.

        Returns:
            The mode of log-probabilities in effect.

        Raises:
            GenerationError: It cannot generate.
            RollwireError: INTERNAL / `INTERNAL`: the workers failed.
        """
        prepared = await self._call("rl_prepare")
        if self._description.device == "npu" and prepared[0]["reload"] and not self._description.sleep_disabled:
            self._description = replace(self._description, sleep_disabled=_EXPERTS_DO_NOT_SLEEP)
        greedy = Sampling(0.0, 1.0, 0, 1, frozenset(), trajectory_pb2.LOGPROB_MODE_SAMPLED)
        arguments = sampling_arguments(GenerationRequest([0], greedy, 0, 2)) | {"output_kind": self._final_only}
        async with aclosing(self._outputs([0], arguments, self._version)) as outputs:
            async for _ in outputs:
                pass
        return str(prepared[0]["logprobs_mode"])

    async def failed(self) -> str:
        """See `Engine`: vLLM's processes have died, or sleeping or waking has failed half way."""
        while not self._lost:
            try:
                await self._engine.check_health()
            except self._dead_error:
                return self._died()
            await asyncio.sleep(_HEALTH_INTERVAL_S)
        return self._fault

    async def close(self) -> None:
        """See `Engine`."""
        if self._engine is None:
            return
        await self.abort_all()
        engine, self._engine = self._engine, None
        self._fault = "the engine was closed"
        # Else it takes the end of the processes for a failure, and logs one.
        if engine.output_handler is not None:
            engine.output_handler.cancel()
        await asyncio.to_thread(stop_vllm, engine)

    async def _outputs(
        self, token_ids: Any, arguments: Mapping[str, Any], version: weights_pb2.WeightVersion, *, scoring: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Runs one vLLM request; closing the iterator aborts it."""
        request_id = str(next(self._numbers))
        # The salt keeps what one version has computed out of another's prefixes.
        prompt = {"type": "token", "prompt_token_ids": list(token_ids), "cache_salt": version_text(version)}
        self._running.add(request_id)
        if scoring:
            self._scoring.add(request_id)
        self._none_running.clear()
        try:
            parameters = self._sampling_params(**arguments)
            outputs = self._engine.generate(prompt=prompt, sampling_params=parameters, request_id=request_id)
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finished:
                        self._ended(request_id)
                    yield output
        except self._dead_error as error:
            raise GenerationError(self._died()) from error
        except Exception as error:
            # vLLM has a tree of errors of its own, and wraps what went wrong in this process in one without text.
            raise GenerationError(f"vllm refused the request: {one_line(error.__cause__ or error)}") from error
        finally:
            self._ended(request_id)

    def _ended(self, request_id: str) -> None:
        self._running.discard(request_id)
        self._scoring.discard(request_id)
        if not self._running:
            self._none_running.set()

    async def _raw_logprobs(
        self, request: GenerationRequest, drawn: list[int], version: weights_pb2.WeightVersion, aborts: int
    ) -> list[float] | None:
        """Scores drawn tokens under the raw distribution, in one pass over the whole sequence.

        Returns:
            As many log-probabilities as tokens; None if it was too late: more than `aborts` calls of `abort_all` have
            returned, and the weights may be others.
        """
        tokens = [*request.token_ids, *drawn]
        if self._aborts != aborts:
            return None
        if len(tokens) >= self._description.max_sequence_tokens:
            raise GenerationError(
                f"the vllm engine has raw log-probabilities only of sequences shorter than "
                f"{self._description.max_sequence_tokens} tokens; ask for LOGPROB_MODE_SAMPLED"
            )
        arguments = {
            "temperature": 0.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        }
        arguments |= {"output_kind": self._final_only, "ignore_eos": True}
        async with aclosing(self._outputs(tokens, arguments, version, scoring=True)) as outputs:
            async for output in outputs:
                if output.prompt_logprobs is None or output.outputs[0].finish_reason == "abort":
                    break
                return [float(value) for value in output.prompt_logprobs.logprobs[-len(drawn) :]]
        return None

    async def _load(
        self, file: HostFile, tensor_digests: Mapping[str, bytes] | None, complete: bool
    ) -> tuple[dict[str, bytes], list[str]]:
        """Loads a file into the live weights; returns digests by name, and the names of what cannot be compared."""
        hashing = asyncio.to_thread(
            lambda: dict(tensor_digests) if tensor_digests is not None else _tensor_digests(file)
        )
        load = self._call("rl_load", file.path, wire_entries(file.entries), self._names.aliases, complete)
        reports, digests = await asyncio.gather(load, hashing)
        return digests, check_reports(file.entries, reports)

    async def _whole(self, doing: str, call: Awaitable[Any]) -> None:
        """Waits for what vLLM cannot take back; when it fails, the engine has failed."""
        try:
            await self._answer(doing, call)
        except RollwireError as error:
            self._fault = f"{doing} failed half way: {error.message}; restart the rollout server"
            self._lost = True
            raise _internal(self._fault) from error

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of `RolloutWorker` on every rank, between engine steps."""
        results: list[Any] = await self._answer(method, self._engine.collective_rpc(method, args=arguments))
        return results

    async def _answer(self, method: str, call: Awaitable[Any]) -> Any:
        """Waits for vLLM's answer to a call, and makes one kind of error of what it may raise."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                return await call
        except self._dead_error as error:
            raise _internal(self._died()) from error
        except TimeoutError as error:
            raise _internal(f"vllm's workers did not finish {method} within {LOAD_TIMEOUT_S:.0f} s") from error
        except Exception as error:  # what a worker raises arrives as text in one of several types
            raise _internal(f"vllm's workers failed in {method}: {one_line(error)}") from error

    def _died(self) -> str:
        cause = self._output.failure()
        self._fault = f"vllm's engine process has died{f' ({cause})' if cause else ''}; restart the rollout server"
        return self._fault


async def _in_shared_memory(make: Callable[[], HostFile]) -> HostFile:
    try:
        return await asyncio.to_thread(make)
    except HostMemoryError as error:
        raise exhausted(Reason.HOST_MEMORY_EXHAUSTED, str(error), _MEMORY_RETRY_S) from error


def _tensor_digests(tensors: Mapping[str, HostTensor]) -> dict[str, bytes]:
    return {name: tensor_digest(tensor.data) for name, tensor in tensors.items()}


def _internal(message: str) -> RollwireError:
    return RollwireError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, message)
