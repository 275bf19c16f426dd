from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.coordinator.groups import GroupPlan, GroupProgress, Tally, reason_name
from rollwire.coordinator.intake import ProtocolError
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]
PLAN = GroupPlan(
    group_id="g00000000",
    index=0,
    split="train",
    environment_tag="FrozenLake",
    environment_options=Struct(),
    environment_seed=7,
    sampling_seed=8,
    episodes=3,
    sampling=trajectory_pb2.SamplingSettings(temperature=1.0, max_tokens=4),
    max_episode_tokens=100,
    episode_timeout_s=1.5,
    environment_targets=("127.0.0.1:1",),
)


def failure(episode: int, reason: trajectory_pb2.FailureReason.ValueType) -> rollout_pb2.RunGroupResponse:
    return rollout_pb2.RunGroupResponse(failure=trajectory_pb2.EpisodeFailure(episode_index=episode, reason=reason))


def test_the_request_carries_the_plan() -> None:
    fence = trajectory_pb2.Fence(run_id="r", epoch=1)
    version = weights_pb2.WeightVersion(lineage="l", step=3)
    request = PLAN.request(fence, 2, [0, 2], version)
    assert (request.fence, request.required_version) == (fence, version)
    assert (request.group_id, request.attempt, list(request.episode_indices)) == ("g00000000", 2, [0, 2])
    assert (request.environment_seed, request.sampling_seed, request.episodes) == (7, 8, 3)
    assert request.episode_timeout.ToMilliseconds() == 1500
    assert list(request.environment_targets) == ["127.0.0.1:1"]
    assert not PLAN.request(fence, 0, [0], None).HasField("required_version")


def test_failed_episodes_are_asked_for_again_and_keep_their_place(make_trajectory: Maker) -> None:
    tally = Tally()
    progress = GroupProgress(PLAN, 3, tally)
    assert progress.begin_attempt() == [0, 1, 2]
    progress.add(rollout_pb2.RunGroupResponse(trajectory=make_trajectory(episode=2)))
    progress.add(failure(0, trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR))
    progress.fail_pending(trajectory_pb2.FAILURE_REASON_ROLLOUT_LOST, "gone")
    progress.end_attempt()
    assert not progress.complete and progress.begin_attempt() == [0, 1]
    for episode in (1, 0):
        progress.add(rollout_pb2.RunGroupResponse(trajectory=make_trajectory(episode=episode, attempt=1)))
    progress.end_attempt()
    assert progress.complete
    assert [(item.episode_index, item.attempt) for item in progress.trajectories] == [(0, 1), (1, 1), (2, 0)]
    assert (tally.requested, tally.completed) == (5, 3)
    assert tally.failed == {"environment_error": 1, "rollout_lost": 1}


def test_a_group_without_attempts_left_is_never_complete() -> None:
    progress = GroupProgress(PLAN, 2, Tally())
    for _ in range(2):
        assert not progress.exhausted
        progress.begin_attempt()
        progress.fail_pending(trajectory_pb2.FAILURE_REASON_ENVIRONMENT_TIMEOUT, "slow")
        progress.end_attempt()
    assert progress.exhausted and not progress.complete
    assert len(progress.failures) == 6


@pytest.mark.parametrize("episode", [0, 5])
def test_results_that_were_not_asked_for_are_refused(make_trajectory: Maker, episode: int) -> None:
    progress = GroupProgress(PLAN, 3, Tally())
    progress.begin_attempt()
    progress.add(rollout_pb2.RunGroupResponse(trajectory=make_trajectory(episode=0)))
    with pytest.raises(ProtocolError):
        progress.add(rollout_pb2.RunGroupResponse(trajectory=make_trajectory(episode=episode)))
    with pytest.raises(ProtocolError):
        progress.add(failure(episode, trajectory_pb2.FAILURE_REASON_CANCELLED))


def test_an_attempt_cannot_end_with_episodes_unaccounted_for() -> None:
    progress = GroupProgress(PLAN, 3, Tally())
    progress.begin_attempt()
    with pytest.raises(AssertionError, match="requested = completed"):
        progress.end_attempt()


def test_a_refused_call_costs_no_attempt() -> None:
    tally = Tally()
    progress = GroupProgress(PLAN, 1, tally)
    progress.begin_attempt()
    progress.withdraw()
    assert (tally.requested, progress.attempt, progress.exhausted) == (0, 0, False)
    assert progress.begin_attempt() == [0, 1, 2]


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_requested_is_completed_plus_failed_after_every_attempt(order: random.Random) -> None:
    tally = Tally()
    progress = GroupProgress(PLAN, 4, tally)
    while not (progress.complete or progress.exhausted):
        for episode in progress.begin_attempt():
            assert tally.in_flight > 0
            match order.randrange(3):
                case 0:
                    trajectory = trajectory_pb2.Trajectory(
                        trajectory_id=f"t{episode}.{progress.attempt}",
                        group_id=PLAN.group_id,
                        episode_index=episode,
                        attempt=progress.attempt,
                        sequences=[trajectory_pb2.TokenSequence(token_ids=[1], loss_mask=[False], logprobs=[0.0])],
                        turns=[trajectory_pb2.Turn()],
                    )
                    progress.add(rollout_pb2.RunGroupResponse(trajectory=trajectory))
                case 1:
                    progress.add(failure(episode, trajectory_pb2.FAILURE_REASON_GENERATION_ERROR))
        progress.fail_pending(trajectory_pb2.FAILURE_REASON_ROLLOUT_LOST, "gone")
        progress.end_attempt()
        assert tally.requested == tally.completed + tally.failed.total()
        assert tally.in_flight == 0
    assert progress.complete == (len(progress.trajectories) == 3)


def test_reasons_have_readable_names_even_unknown_ones() -> None:
    assert reason_name(trajectory_pb2.FAILURE_REASON_ENVIRONMENT_TIMEOUT) == "environment_timeout"
    assert reason_name(99) == "reason_99"  # type: ignore[arg-type]
