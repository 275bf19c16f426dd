"""How a batch is divided: optimizer steps by a seeded shuffle, micro-batches by a token budget. Pure functions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

# What a forward and backward pass costs beside its tokens: Python on a CPU, kernel launches on an accelerator.
_PASS_COST_TOKENS: Final = {"cpu": 128}
_PASS_COST_TOKENS_ACCELERATOR: Final = 2048


def _go_on() -> None:
    """The check of a budget whose work is never abandoned."""


@dataclass(frozen=True)
class Budget:
    """What one forward and backward pass may hold.

    Attributes:
        micro_batch_tokens: Most tokens, padding included.
        pass_cost_tokens: Fixed cost of a pass, in tokens, see `pass_cost_tokens`.
        before_pass: Called before every pass; raises to abandon the work.
    """

    micro_batch_tokens: int
    pass_cost_tokens: int
    before_pass: Callable[[], None] = _go_on

    def divide(self, lengths: Sequence[int], *, packed: bool = False) -> list[list[int]]:
        """Returns micro-batches as indices into `lengths`, see `micro_batches` and `packed_batches`."""
        if packed:
            return packed_batches(lengths, self.micro_batch_tokens)
        return micro_batches(lengths, self.micro_batch_tokens, self.pass_cost_tokens)

    def work(self, lengths: Sequence[int], batch: Sequence[int], *, packed: bool = False) -> int:
        """Returns the work of a pass in tokens: its own and its padding, and its fixed cost."""
        tokens = sum(lengths[index] for index in batch) if packed else padded_tokens(lengths, [batch])
        return tokens + self.pass_cost_tokens


def pass_cost_tokens(device_type: str) -> int:
    """Returns the fixed cost of a forward and backward pass on a kind of device, in tokens."""
    return _PASS_COST_TOKENS.get(device_type, _PASS_COST_TOKENS_ACCELERATOR)


def optimizer_step_split(samples: int, steps: int, seed: int) -> list[list[int]]:
    """Divides a batch into optimizer steps of nearly equal size.

    Args:
        samples: Number of samples, >= 1.
        steps: Optimizer steps wanted, >= 1; more than `samples` is reduced to it.
        seed: Seed of the shuffle, 0 to 2^64 - 1.

    Returns:
        For each optimizer step the indices of its samples; every index occurs exactly once.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(samples)
    return [part.tolist() for part in np.array_split(order, min(steps, samples))]


def micro_batches(lengths: Sequence[int], max_tokens: int, pass_cost_tokens: int) -> list[list[int]]:
    """Divides samples into micro-batches with the least work in all.

    Samples of similar length go together. Among all divisions of the sorted samples the one is taken that minimises
    padded tokens plus `pass_cost_tokens` for every micro-batch, by dynamic programming over the place of the last cut.

    Args:
        lengths: Tokens of each sample, >= 1.
        max_tokens: Most tokens of a micro-batch, padding included. A longer sample gets a micro-batch of its own.
        pass_cost_tokens: Fixed cost of a forward and backward pass, in tokens.

    Returns:
        Indices of each micro-batch, longest first (so that memory peaks at the start); every index occurs exactly once.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    count = len(order)
    cost = np.zeros(count + 1)  # cost[end]: least work for the `end` shortest samples
    cut = np.zeros(count + 1, dtype=np.int64)  # cut[end]: where the last micro-batch of that division begins
    for end in range(1, count + 1):
        width = lengths[order[end - 1]]
        earliest = max(0, end - max(1, max_tokens // width))
        begins = np.arange(earliest, end)
        work = cost[earliest:end] + (end - begins) * width
        best = int(np.argmin(work))
        cost[end] = work[best] + pass_cost_tokens
        cut[end] = earliest + best
    batches = []
    end = count
    while end > 0:
        begin = int(cut[end])
        batches.append(order[begin:end].tolist())
        end = begin
    return batches


def packed_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divides samples that take only their own tokens into few micro-batches: best fit, the longest sample first.

    Needs at most 11/9 of the fewest possible, and one more (Johnson et al. 1974, SIAM J. Comput. 3(4)).

    Args:
        lengths: Tokens of each sample, >= 1.
        max_tokens: Most tokens of a micro-batch. A longer sample gets a micro-batch of its own.

    Returns:
        Indices of each micro-batch; every index occurs exactly once.
    """
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room left and number of each micro-batch, ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(rooms, (lengths[index], 0))
        if place == len(rooms):
            room, number = max_tokens, len(batches)
            batches.append([])
        else:
            room, number = rooms.pop(place)
        batches[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return batches


def padded_tokens(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Returns the number of tokens that a division computes, padding included."""
    return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
