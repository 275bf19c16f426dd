"""Which sequences hold a slot of the key-value cache, and what the next pass computes. Pure: no torch, no clock.

A generation waits until it has a slot, then runs: each pass takes a chunk of its tokens that are not in the cache yet,
and the chunk that reaches the end of the sequence yields one more token. When it ends, a sequence with a cache key
keeps its slot idle for the generation that extends it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from rollwire.rollout.engine import GenerationRequest
from rollwire.v1 import trajectory_pb2


@dataclass(slots=True)
class Sequence:
    """Tokens that own a slot.

    Attributes:
        slot: Row of the cache.
        tokens: Prompt and drawn tokens.
        cached: Number of leading tokens whose keys and values the slot holds.
        idle_since_s: When its last generation ended.
    """

    slot: int
    tokens: list[int]
    cached: int = 0
    idle_since_s: float = 0.0


@dataclass(slots=True, eq=False)
class Generation:
    """A generation that waits or runs.

    Attributes:
        request: What was asked for.
        sequence: Its tokens, once it has a slot.
        token_ids: Tokens drawn so far.
        logprobs: Their log-probabilities.
        reported: Number of drawn tokens that the caller has been told of.
        stop_reason: Set when it has ended.
    """

    request: GenerationRequest
    sequence: Sequence | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reported: int = 0
    stop_reason: trajectory_pb2.StopReason.ValueType = trajectory_pb2.STOP_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that a pass computes.

    Attributes:
        generation: Whose they are.
        slot: Row of the cache.
        tokens: The whole sequence; the pass computes `tokens[begin:end]`.
        begin: First position, equal to the number of tokens in the cache.
        end: One past the last position.
    """

    generation: Generation
    slot: int
    tokens: list[int]
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """True if the pass reaches the end of the sequence, so that a token is drawn."""
        return self.end == len(self.tokens)


class Scheduler:
    """Slots, the waiting line, and the choice of chunks.

    Args:
        slots: Rows of the cache.
        tokens_per_pass: Most tokens of one pass; longer prompts are computed in pieces.
        one_sequence_per_pass: Never compute two sequences together, so that nothing but a sequence itself
            influences its floating-point results.
        keep_idle_s: An idle sequence this old may lose its slot to a waiting generation; None keeps it until it is
            released.
    """

    def __init__(
        self, slots: int, tokens_per_pass: int, *, one_sequence_per_pass: bool, keep_idle_s: float | None
    ) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._tokens_per_pass = tokens_per_pass
        self._one_sequence_per_pass = one_sequence_per_pass
        self._keep_idle_s = keep_idle_s
        self._waiting: OrderedDict[int, Generation] = OrderedDict()
        self._running: OrderedDict[int, Generation] = OrderedDict()
        self._idle: OrderedDict[str, Sequence] = OrderedDict()

    @property
    def has_generations(self) -> bool:
        """True if any generation waits or runs."""
        return bool(self._waiting or self._running)

    def submit(self, generation: Generation) -> None:
        """Accepts a generation; one that extends an idle sequence runs at once, others wait in line."""
        request = generation.request
        kept = self._idle.pop(request.cache_key, None) if request.cache_key else None
        if kept is None:
            self._waiting[id(generation)] = generation
            return
        # At least the last token is computed again: its logits are needed.
        tokens = list(request.token_ids)
        kept.cached = min(_common_length(kept.tokens[: kept.cached], tokens), len(tokens) - 1)
        kept.tokens = tokens
        generation.sequence = kept
        self._running[id(generation)] = generation

    def next_pass(self, now_s: float) -> list[Chunk]:
        """Hands free slots to the line and returns the chunks of the next pass; empty when nothing can run."""
        self._admit(now_s)
        chunks: list[Chunk] = []
        budget = self._tokens_per_pass
        for generation in list(self._running.values()):
            sequence = generation.sequence
            assert sequence is not None
            end = min(len(sequence.tokens), sequence.cached + budget)
            chunks.append(Chunk(generation, sequence.slot, sequence.tokens, sequence.cached, end))
            budget -= end - sequence.cached
            # Those that were served go to the back, so that a full pass starves nobody.
            self._running.move_to_end(id(generation))
            if budget <= 0 or self._one_sequence_per_pass:
                break
        return chunks

    def can_run(self, now_s: float) -> bool:
        """Tells whether `next_pass` has work."""
        return bool(self._running or (self._waiting and (self._free or self._may_evict(now_s))))

    def wait_s(self, now_s: float) -> float | None:
        """Returns after how long a waiting generation may take an idle slot; None if only a call changes anything."""
        if not self._waiting or not self._idle or self._keep_idle_s is None:
            return None
        oldest = next(iter(self._idle.values()))
        return max(0.0, oldest.idle_since_s + self._keep_idle_s - now_s)

    def computed(self, chunk: Chunk) -> None:
        """Records that a pass put a chunk into the cache."""
        sequence = chunk.generation.sequence
        assert sequence is not None
        sequence.cached = chunk.end

    def drawn(self, generation: Generation, token_id: int, logprob: float, now_s: float) -> None:
        """Records a drawn token and ends the generation if it is the last one."""
        sequence, request = generation.sequence, generation.request
        assert sequence is not None
        sequence.tokens.append(token_id)
        generation.token_ids.append(token_id)
        generation.logprobs.append(logprob)
        if token_id in request.sampling.stop_token_ids:
            self._end(generation, trajectory_pb2.STOP_REASON_STOP_TOKEN, now_s)
        elif len(sequence.tokens) >= request.length_limit_tokens:
            self._end(generation, trajectory_pb2.STOP_REASON_LENGTH_LIMIT, now_s)
        elif len(generation.token_ids) >= request.sampling.max_tokens:
            self._end(generation, trajectory_pb2.STOP_REASON_MAX_TOKENS, now_s)

    def abort(self, generation: Generation) -> None:
        """Ends a generation early; one that has ended is left alone. Its slot is free at once."""
        self._waiting.pop(id(generation), None)
        self._running.pop(id(generation), None)
        if generation.stop_reason == trajectory_pb2.STOP_REASON_UNSPECIFIED:
            generation.stop_reason = trajectory_pb2.STOP_REASON_ABORTED
        self._give_back(generation)

    def generations(self) -> list[Generation]:
        """Returns all that wait or run."""
        return [*self._waiting.values(), *self._running.values()]

    def release(self, cache_key: str) -> None:
        """Frees the slot kept under a key."""
        sequence = self._idle.pop(cache_key, None)
        if sequence is not None:
            self._free.append(sequence.slot)

    def forget_kept(self) -> None:
        """Frees all idle slots: what they hold was computed by other weights."""
        for cache_key in list(self._idle):
            self.release(cache_key)

    def _admit(self, now_s: float) -> None:
        while self._waiting and (self._free or self._evict(now_s)):
            _, generation = self._waiting.popitem(last=False)
            generation.sequence = Sequence(self._free.pop(), list(generation.request.token_ids))
            self._running[id(generation)] = generation

    def _evict(self, now_s: float) -> bool:
        """Takes the slot of the sequence that has been idle longest, if that is long enough."""
        if not self._may_evict(now_s):
            return False
        self.release(next(iter(self._idle)))
        return True

    def _may_evict(self, now_s: float) -> bool:
        return self.wait_s(now_s) == 0.0

    def _end(self, generation: Generation, stop_reason: trajectory_pb2.StopReason.ValueType, now_s: float) -> None:
        generation.stop_reason = stop_reason
        self._running.pop(id(generation))
        sequence, cache_key = generation.sequence, generation.request.cache_key
        if not cache_key or sequence is None:
            self._give_back(generation)
            return
        generation.sequence = None
        self.release(cache_key)
        sequence.idle_since_s = now_s
        self._idle[cache_key] = sequence

    def _give_back(self, generation: Generation) -> None:
        if generation.sequence is not None:
            self._free.append(generation.sequence.slot)
            generation.sequence = None


def _common_length(kept: list[int], wanted: list[int]) -> int:
    """Returns the length of the common prefix."""
    if wanted[: len(kept)] == kept:
        return len(kept)
    count = 0
    for have, want in zip(kept, wanted, strict=False):
        if have != want:
            break
        count += 1
    return count
