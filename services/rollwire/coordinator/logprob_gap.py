"""The gap between the log-probabilities that engine and learner give the same tokens, and the alarm that ends a run.

Engine and learner compute the same function with other kernels, so that a small gap is rounding. A larger one means
that they do not have the same policy: weights that did not arrive, a stale prefix cache, another temperature. Training
on it looks healthy and ruins the policy slowly, which is why it ends the run.

The bounds are on the mean over tokens of the absolute difference, in nats. Measured with the engines `transformers` and
`vllm` on CPU: docs/metrics.md has the figures. On accelerators they come from what others report: 0.01 to 0.025 for
healthy bfloat16 runs on GPUs, 0.075 to 0.178 for NPU runs whose weights arrived in a wrong layout. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rollwire.coordinator.errors import RunError

PREFIX: Final = "actor/logprob_gap_"
"""Begins the names of the gap's scalars, as the learner reports them."""

BOUNDS: Final[Mapping[tuple[str, str], float]] = {
    ("cpu", "float32"): 1e-4,
    ("cpu", "bfloat16"): 0.05,
    ("cuda", "float32"): 5e-3,
    ("cuda", "bfloat16"): 0.05,
    ("npu", "float32"): 5e-3,
    ("npu", "bfloat16"): 0.06,
}
"""Largest mean gap in nats by device and element type."""


MIN_TOKENS: Final = 128
"""Tokens that a mean is taken over at least."""


@dataclass(frozen=True)
class Bound:
    """The largest mean gap that is taken for rounding.

    Attributes:
        nats: The bound; infinite when the alarm is off.
        origin: Where it comes from, for people.
    """

    nats: float
    origin: str


def choose_bound(setting: float | Literal["auto"], devices: Iterable[str], dtypes: Iterable[str]) -> Bound:
    """Returns the bound for a run.

    Args:
        setting: `algorithm.max_logprob_gap`.
        devices: Device types of all engines and of the learner.
        dtypes: Element types that they compute in, `float32` or `bfloat16`.
    """
    if setting != "auto":
        return Bound(setting or math.inf, "algorithm.max_logprob_gap")
    dtype = "bfloat16" if any(dtype != "float32" for dtype in dtypes) else "float32"
    found = sorted({device if (device, dtype) in BOUNDS else "cuda" for device in devices})
    device = max(found, key=lambda name: BOUNDS[name, dtype])
    return Bound(BOUNDS[device, dtype], f"the default for {device} in {dtype}")


class GapAlarm:
    """Ends a run whose gap is too large; adds up steps with few tokens, for a single token may be far off by rounding.

    Args:
        bound: Largest mean gap.
    """

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._sum = 0.0
        self._tokens = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks the gap of a training step; a step without any is fine.

        Args:
            step: Number of the step, for the text.
            metrics: Scalars of the step, with those of the gap.

        Raises:
            RunError: The mean is larger than the bound whatever further tokens were like, or not a number.
        """
        tokens = int(metrics.get(f"{PREFIX}tokens", 0))
        if not tokens or not math.isfinite(self._bound.nats):
            return
        self._sum += metrics.get(f"{PREFIX}mean", math.nan) * tokens
        self._tokens += tokens
        if not self._sum <= self._bound.nats * max(self._tokens, MIN_TOKENS):  # not a number fails too
            raise RunError(self._text(step, metrics.get(f"{PREFIX}max", math.nan)))
        if self._tokens >= MIN_TOKENS:
            self._sum, self._tokens = 0.0, 0

    def _text(self, step: int, largest: float) -> str:
        mean = self._sum / self._tokens
        return (
            f"step {step}: engine and learner do not have the same policy: their log-probabilities of {self._tokens} "
            f"tokens drawn with the learner's present weights differ by {mean:.3g} nats on average, "
            f"{largest:.3g} at most; the mean may be {self._bound.nats:g} ({self._bound.origin})\n"
            "  likely causes: weights that the engine did not take or keeps in another layout, a stale prefix cache, "
            "another temperature or attention than the learner's\n"
            "  to find out: rollwire selftest weights CONFIG, with the same settings. An engine that is right and only "
            "rounds more needs a higher algorithm.max_logprob_gap; 0 turns this check off"
        )
