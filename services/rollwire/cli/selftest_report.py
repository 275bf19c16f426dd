"""What `rollwire selftest weights` found, and what it means. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rollwire.coordinator.logprob_gap import PREFIX, Bound

VISIBLE: Final = 3.0
"""A step must move the log-probabilities by so many gaps: then an engine with the old weights would be seen."""


@dataclass
class Stage:
    """One version, after it was activated.

    Attributes:
        name: What was done.
        received_bytes: Payload that the rollout server fetched.
        digest: Digest that the learner published.
        gaps: Gap by temperature, under the names of `gap_metrics`.
        fault: What a server said was wrong; empty if nothing.
    """

    name: str
    received_bytes: int = 0
    digest: bytes = b""
    gaps: dict[float, Mapping[str, float]] = field(default_factory=dict)
    fault: str = ""

    def mean(self, temperature: float) -> float:
        """Returns the mean gap; infinite if it is not a number."""
        return self.gaps[temperature].get(f"{PREFIX}mean", math.inf)

    def within(self, bound: Bound) -> bool:
        """Returns whether all gaps are within the bound."""
        return all(self.mean(temperature) <= bound.nats for temperature in self.gaps)


@dataclass
class Report:
    """Everything that was measured.

    Attributes:
        bound: Largest mean gap.
        stages: Version 0, after a step, after a step with learning rate 0; fewer after a fault.
        moved: By how much the step moved the learner's log-probabilities of the tokens of version 0, as a mean.
    """

    bound: Bound
    stages: list[Stage] = field(default_factory=list)
    moved: float = math.nan


def diagnose(report: Report) -> str:
    """Returns in one line what is wrong; an empty text if nothing is."""
    first = report.stages[0]
    for stage in report.stages:
        if stage.fault:
            return f"{stage.name}: {stage.fault}"
        if not stage.within(report.bound):
            return _explain_gap(report, stage, first)
    _, trained, unchanged = report.stages
    if trained.digest == first.digest or not report.moved > 0:
        return "a training step changed nothing; the learner's optimizer or the cast to model.dtype loses every change"
    if report.moved < VISIBLE * trained.mean(next(iter(trained.gaps))):
        return (
            f"the step moved the log-probabilities by only {report.moved:.3g} nats, too little to tell an engine with "
            "new weights from one with old ones"
        )
    if unchanged.digest != trained.digest:
        return "a step with learning rate 0 changed the weights; the learner's optimizer or sharding damages them"
    if unchanged.received_bytes:
        return (
            f"an update without changes brought {unchanged.received_bytes:,} bytes; the rollout server has lost the "
            "version that it held, or the learner does not know it"
        )
    return ""


def _explain_gap(report: Report, stage: Stage, first: Stage) -> str:
    usual, other = stage.gaps
    gap = max(stage.mean(temperature) for temperature in stage.gaps)
    what = f"{stage.name}: engine and learner differ by {gap:.3g} nats, the bound is {report.bound.nats:g}"
    if stage is not first and first.within(report.bound):
        return f"{what}; they agreed before: the engine works with old weights, or with prefixes cached from them"
    wrong = [temperature for temperature in (usual, other) if stage.mean(temperature) > report.bound.nats]
    if len(wrong) == 1:
        return (
            f"{what}, at temperature {wrong[0]:g} alone; the engine reports log-probabilities of another distribution "
            "than it draws from, such as the one before the temperature"
        )
    return (
        f"{what}; from the same weights they compute another function: compare model.attention, learner.precision and "
        "the versions of transformers and the engine"
    )
