"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math

from rollwire.serving.config.sections import OptimizerSection


def learning_rate(index: int, total_steps: int, settings: OptimizerSection) -> float:
    """Returns the rate of one optimizer step.

    During the warm-up the rate rises linearly and reaches the peak in the first step after it. Then it stays
    (`constant`) or falls, linearly or on half a cosine, to `final_learning_rate_ratio` of the peak in step
    `total_steps - 1`, and stays there.

    Args:
        index: Optimizer steps attempted before this one, since the learner started.
        total_steps: Optimizer steps of the whole run.
        settings: Peak, schedule and warm-up.
    """
    peak = settings.learning_rate
    if index < settings.warmup_steps:
        return peak * (index + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return peak
    progress = min(1.0, (index - settings.warmup_steps) / max(1, total_steps - 1 - settings.warmup_steps))
    share = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    final = settings.final_learning_rate_ratio
    return peak * (final + (1 - final) * share)
