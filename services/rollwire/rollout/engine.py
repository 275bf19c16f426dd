"""What the rollout server needs of an inference engine: token ids in, token ids, log-probabilities and version out.

An engine knows nothing of text, episodes, fences or admission. The rest of the server guarantees it two things: weights
are loaded only while nothing is being generated, and a cache key is used by one generation at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollwire.rpc.weight_stream import HostTensor, TensorLayout
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2


class GenerationError(Exception):
    """The engine failed on one generation; the text is one line without server paths."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, all defaults resolved.

    Attributes:
        temperature: Divisor of the logits; 0 is greedy, the lowest id among equals.
        top_p: Nucleus mass in (0, 1]; 1 is off. Applied after `top_k`, to the renormalised distribution.
        top_k: Number of most probable tokens kept; 0 is off.
        max_tokens: Most tokens drawn.
        stop_token_ids: Tokens that end the generation; the one drawn is part of the output.
        logprob_mode: Which distribution log-probabilities belong to.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    logprob_mode: trajectory_pb2.LogprobMode.ValueType


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation.

    Attributes:
        token_ids: Prompt, at least one token, shorter than `length_limit_tokens`.
        sampling: How tokens are drawn.
        seed: Determines every draw together with its position, whatever else runs.
        length_limit_tokens: Prompt and output together never exceed this.
        cache_key: Names the prefix that a following generation extends; empty means that none will.
        stream: Deliver tokens as they are drawn; otherwise one piece at the end.
    """

    token_ids: Sequence[int]
    sampling: Sampling
    seed: int
    length_limit_tokens: int
    cache_key: str = ""
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens drawn since the last piece.

    Attributes:
        token_ids: The tokens.
        logprobs: Natural-log probability of each, as long as `token_ids`.
        version: Weights that drew them.
        stop_reason: Set in the last piece, else STOP_REASON_UNSPECIFIED.
    """

    token_ids: list[int]
    logprobs: list[float]
    version: weights_pb2.WeightVersion
    stop_reason: trajectory_pb2.StopReason.ValueType


@dataclass(frozen=True)
class EngineDescription:
    """Facts that do not change while an engine lives.

    Attributes:
        name: Name of the engine, as in `rollout.engine`.
        architecture: Model architecture as transformers names it.
        device: `cpu`, `cuda` or `npu`.
        dtype: Element type that it computes in.
        vocabulary_size: Valid token ids are 0 to this minus 1.
        max_sequence_tokens: Longest sequence, prompt and output together.
        max_concurrent_sequences: Sequences decoded together.
        sleep_disabled: Why `sleep` cannot free the device and what to do about it; empty if it can, and on CPU.
        lowest_temperature: The engine cannot sample at a lower one, except 0.
    """

    name: str
    architecture: str
    device: str
    dtype: weights_pb2.DataType.ValueType
    vocabulary_size: int
    max_sequence_tokens: int
    max_concurrent_sequences: int
    sleep_disabled: str = ""
    lowest_temperature: float = 0.0


class Engine(Protocol):
    """An inference engine with one set of weights."""

    @property
    def description(self) -> EngineDescription:
        """The engine's facts."""

    @property
    def generated_tokens(self) -> int:
        """Tokens drawn since the engine started."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        """Returns the layout of every tensor that `load_weights` needs, by name."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """Continues a sequence; closing the iterator early aborts the generation.

        Raises:
            GenerationError: The engine failed on this generation.
        """

    def release(self, cache_key: str) -> None:
        """Frees the prefix that was kept under a key; unknown keys are ignored."""

    async def abort_all(self) -> None:
        """Ends all generations with STOP_REASON_ABORTED; returns when the last one has ended."""

    async def stage_weights(
        self,
        version: weights_pb2.WeightVersion,
        tensors: Mapping[str, HostTensor],
        tensor_digests: Mapping[str, bytes] | None = None,
    ) -> None:
        """Prepares a load while generations run, so that `load_weights` takes less time; may do nothing.

        The load that follows gets the same arguments, or never comes.

        Raises:
            RollwireError: INTERNAL / `INTERNAL`; RESOURCE_EXHAUSTED / `HOST_MEMORY_EXHAUSTED`. What serves is not
                affected.
        """

    async def load_weights(
        self,
        version: weights_pb2.WeightVersion,
        tensors: Mapping[str, HostTensor],
        tensor_digests: Mapping[str, bytes] | None = None,
    ) -> bytes:
        """Replaces all weights in place and forgets every kept prefix.

        Args:
            version: Version that the weights are.
            tensors: Exactly the tensors of `layouts`.
            tensor_digests: `TensorSpec.digest` (32 bytes) of each tensor, if it is known.

        Returns:
            `WeightManifest.digest` (32 bytes), computed from what the engine now holds.
        """

    async def held_digest(self) -> bytes:
        """Reads every tensor back and returns the `WeightManifest.digest` (32 bytes) of what the engine holds now.

        Raises:
            RollwireError: INTERNAL / `INTERNAL`: they cannot be read; RESOURCE_EXHAUSTED / `HOST_MEMORY_EXHAUSTED`.
        """

    @property
    def unverified(self) -> Sequence[str]:
        """Names of the tensors that cannot be read back; in `held_digest` what was loaded counts for them."""

    async def sleep(self, level: rollout_pb2.SleepLevel.ValueType) -> int:
        """Frees the device's memory; called while nothing is generated, and until `wake` nothing else but `sleep` is.

        Args:
            level: SLEEP_LEVEL_HOST keeps the weights in host memory; SLEEP_LEVEL_DISCARD need not, it may follow.

        Returns:
            Bytes given back to the device; 0 on CPU.

        After an error what the engine holds is unknown.
        """

    async def wake(self) -> None:
        """Takes the device's memory again; weights that were dropped must be loaded before anything is generated.

        Raises:
            torch.OutOfMemoryError: The memory is not free; the engine sleeps as before. After any other error what the
                engine holds is unknown.
        """

    async def failed(self) -> str:
        """Returns, in one line, why the engine cannot generate any more; does not return while it can."""

    async def close(self) -> None:
        """Aborts what runs and frees the device."""
