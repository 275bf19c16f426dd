"""Plays the fixed validation set with the weights that are served now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollwire.coordinator.budgets import FailureBudget, explain
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.groups import GroupPlan, GroupProgress, Tally
from rollwire.coordinator.ledger_schema import ValidationRecord
from rollwire.coordinator.player import GroupPlayer
from rollwire.coordinator.tasks import run_all
from rollwire.v1 import trajectory_pb2, weights_pb2

MAX_CALLS: Final = 256
"""Calls in flight at once: below what a server accepts, with room for training groups."""


@dataclass(frozen=True)
class ValidationResult:
    """Outcome of one validation.

    Attributes:
        trajectories: Completed episodes, in the order of the set.
        tally: Episodes requested, completed and failed.
        records: What the ledger keeps.
    """

    trajectories: Sequence[trajectory_pb2.Trajectory]
    tally: Tally
    records: Sequence[ValidationRecord]


async def validate(
    kind: str,
    step: int,
    plans: Sequence[GroupPlan],
    player: GroupPlayer,
    budget: FailureBudget,
    version: weights_pb2.WeightVersion,
) -> ValidationResult:
    """Plays a validation set once.

    An episode that fails every attempt is left out of the averages and counted in the tally: a fault is no score.

    Args:
        kind: `val` or `val_greedy`.
        step: Training steps done.
        plans: The set.
        player: Plays one group.
        budget: Ends the run when episodes keep failing.
        version: Version that must play all of it.

    Raises:
        RunError: Too many episodes in a row failed, or no server is left.
    """
    tally = Tally()
    calls = asyncio.Semaphore(MAX_CALLS)

    async def play(plan: GroupPlan) -> GroupProgress:
        async with calls:
            progress = await player.play(plan, tally, version)
        if progress.complete:
            budget.succeeded()
        else:
            what = f"validation episode {plan.group_id} of {plan.environment_tag}, seed {plan.environment_seed}"
            budget.failed(what, progress.failures)
        return progress

    played = await run_all(play(plan) for plan in plans)
    assert tally.in_flight == 0, "requested = completed + failed does not hold"
    trajectories = [trajectory for progress in played for trajectory in progress.trajectories]
    if plans and not trajectories:
        why = explain([failure for progress in played for failure in progress.failures])
        raise RunError(f"all {len(plans)} validation episodes failed, the last one with {why}")
    records = [
        ValidationRecord(
            kind=kind,
            step=step,
            environment_tag=progress.plan.environment_tag,
            start_index=progress.plan.index,
            environment_seed=progress.plan.environment_seed,
            score=trajectory.score,
        )
        for progress in played
        for trajectory in progress.trajectories
    ]
    return ValidationResult(trajectories, tally, records)
