"""Makes the parts of a run from its configuration and the servers found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from rollwire.coordinator.admission import Admission
from rollwire.coordinator.budgets import Budgets, FailureBudget
from rollwire.coordinator.checkpoints import CheckpointKeeper
from rollwire.coordinator.external import External
from rollwire.coordinator.journaled import JournaledTraining
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.logprob_gap import Bound, choose_bound
from rollwire.coordinator.logprob_guard import LogprobGuard
from rollwire.coordinator.loop import Parts
from rollwire.coordinator.peers import Descriptions, Peers
from rollwire.coordinator.placement import Colocated, Placement, Separate
from rollwire.coordinator.planner import Planner
from rollwire.coordinator.player import GroupPlayer
from rollwire.coordinator.preparation import BatchPreparer
from rollwire.coordinator.pump import RolloutPump
from rollwire.coordinator.recorder import Recorder
from rollwire.coordinator.resident import ResidentMemory
from rollwire.coordinator.rollout_pool import RolloutPool
from rollwire.coordinator.run_dir import RunDir
from rollwire.coordinator.scoring import SampleScorer
from rollwire.coordinator.sources import GroupSource, SourceByTag
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.tracking import Tracker
from rollwire.coordinator.training import StepTrainer
from rollwire.coordinator.transcripts import Transcripts
from rollwire.coordinator.weight_check import WeightVerifier
from rollwire.coordinator.weight_push import WeightPusher
from rollwire.serving.config import RunConfig
from rollwire.v1 import learner_pb2, rollout_pb2, trajectory_pb2, weights_pb2

MIN_FAILED_GROUPS: Final = 4
"""A run tolerates at least so many failed groups in a row, however small its steps are."""


def build_parts(
    config: RunConfig,
    run_dir: RunDir,
    status: RunStatus,
    ledger: Ledger,
    peers: Peers,
    found: Descriptions,
    budgets: Budgets,
    children: Callable[[], Mapping[str, int]],
    stack: AsyncExitStack,
) -> Parts:
    """Returns the parts of the step loop; `stack` ends those that need it.

    Args:
        config: The run, with the addresses of its servers.
        run_dir: Its directory.
        status: Its state.
        ledger: Its ledger.
        peers: Its servers.
        found: What they say about themselves.
        budgets: Bounds of retries.
        children: Process ids of servers on this host by kind.
        stack: Closed when the run ends.
    """
    fence = trajectory_pb2.Fence(run_id=status.run_id, epoch=status.epoch)
    recorder = _recorder(config, run_dir, status, stack)
    pool = _pool(config, fence, status, ledger, peers, found, budgets)
    player = GroupPlayer(pool, fence, config.timeouts.group_s, budgets, status.count_episode)
    planner = Planner(config)
    budget = FailureBudget(max(config.batch.groups_per_step, MIN_FAILED_GROUPS))
    admission = Admission(config.batch.groups_per_step, config.max_staleness, config.run.max_steps)
    external = External(config, found, planner, pool, ledger, status, budgets)
    sources: dict[str, GroupSource] = {**{entry.tag: player for entry in config.environments}, **external.sources}
    pump = RolloutPump(admission, planner, SourceByTag(sources), ledger, budget, config.max_staleness)
    guard = _guard(config, pool, peers, found)
    preparer = BatchPreparer(config, SampleScorer(peers.learner, config, budgets, status.notice))
    stack.push_async_callback(pool.close)
    stack.push_async_callback(external.close)
    stack.push_async_callback(pump.close)
    stack.push_async_callback(guard.close)
    return Parts(
        config=config,
        status=status,
        ledger=ledger,
        recorder=recorder,
        placement=_placement(config, fence, pool, peers, budgets),
        planner=planner,
        pool=pool,
        player=player,
        external=external,
        pump=pump,
        preparer=preparer,
        training=JournaledTraining(
            ledger, StepTrainer(peers.learner, config, fence, budgets, status.notice), preparer, status
        ),
        checkpoints=CheckpointKeeper(peers.learner, config, fence, ledger, status),
        guard=guard,
        budget=budget,
        resident=ResidentMemory(peers, children),
    )


def _pool(
    config: RunConfig,
    fence: trajectory_pb2.Fence,
    status: RunStatus,
    ledger: Ledger,
    peers: Peers,
    found: Descriptions,
    budgets: Budgets,
) -> RolloutPool:
    """Returns the rollout servers, with what brings them weights and compares them."""
    pause_mode = rollout_pb2.PauseMode.Value(f"PAUSE_MODE_{config.rollout.pause_mode.upper()}")
    pusher = WeightPusher(fence, peers.learner.target, config.timeouts.update_s, budgets, pause_mode)
    verifier = WeightVerifier(fence, config.timeouts.update_s, budgets, status.notice)
    capacities = [info.episode_capacity for info in found.rollouts]
    return RolloutPool(peers.rollouts, capacities, pusher, verifier, budgets, ledger.add_version, status.notice)


def _placement(
    config: RunConfig, fence: trajectory_pb2.Fence, pool: RolloutPool, peers: Peers, budgets: Budgets
) -> Placement:
    """Returns how learner and rollout servers share devices."""
    if config.placement == "colocated":
        return Colocated(peers.learner, pool, fence, config.timeouts.update_s, budgets)
    return Separate()


def _guard(config: RunConfig, pool: RolloutPool, peers: Peers, found: Descriptions) -> LogprobGuard:
    """Returns what watches the gap between the engines' log-probabilities and the learner's."""
    bound = gap_bound(config, found.learner, found.rollouts)
    return LogprobGuard(pool, peers.learner, bound, config.training_temperature, probing=config.max_staleness > 0)


def _recorder(config: RunConfig, run_dir: RunDir, status: RunStatus, stack: AsyncExitStack) -> Recorder:
    """Returns what writes metrics and texts; its files are closed with the run."""
    tracker = Tracker(run_dir.event_dir, run_dir.path)
    stack.callback(tracker.close)
    every_steps = config.tracking.text_samples_every_steps
    return Recorder(tracker, Transcripts(config.model.path) if every_steps else None, status, every_steps)


def gap_bound(
    config: RunConfig,
    learner: learner_pb2.LearnerServiceGetInfoResponse,
    rollouts: Sequence[rollout_pb2.RolloutServiceGetInfoResponse],
) -> Bound:
    """Returns the largest gap that is rounding on the devices and in the element types of these servers."""
    dtypes = [weights_pb2.DataType.Name(rollout.dtype).removeprefix("DATA_TYPE_").lower() for rollout in rollouts]
    return choose_bound(
        config.algorithm.max_logprob_gap,
        [learner.device, *(rollout.device for rollout in rollouts)],
        [config.learner.precision, *dtypes],
    )
