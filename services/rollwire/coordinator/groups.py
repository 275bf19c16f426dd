"""What a group is to be and how far it has come. Pure: requests are built and results are counted here, not sent.

A group is complete when every episode has a trajectory. Failed episodes are requested again with the next attempt
number; when attempts run out the group is dropped. A failure never becomes a reward: a group is never completed by
leaving episodes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from rollwire.coordinator.intake import ProtocolError, check_trajectory
from rollwire.coordinator.seeds import Split
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

Reason = trajectory_pb2.FailureReason


def reason_name(reason: Reason.ValueType) -> str:
    """Returns the name of a failure reason as metrics and texts show it, such as `environment_timeout`."""
    if reason not in Reason.values():
        return f"reason_{reason}"  # a newer server may know more reasons
    return Reason.Name(reason).removeprefix("FAILURE_REASON_").lower()


@dataclass(frozen=True)
class GroupPlan:
    """A group before it is played.

    Attributes:
        group_id: Identifier, unique in the run.
        index: Position among the groups of its split.
        split: Training or validation.
        environment_tag: What is played.
        environment_options: Options of each session.
        environment_seed: Seed of the start state.
        sampling_seed: Seed that sampling starts from.
        episodes: Number of episodes, >= 1.
        sampling: How tokens are drawn.
        max_episode_tokens: Most tokens of one episode.
        episode_timeout_s: Longest wall time of one episode.
        environment_targets: Environment servers to play on.
    """

    group_id: str
    index: int
    split: Split
    environment_tag: str
    environment_options: Struct
    environment_seed: int
    sampling_seed: int
    episodes: int
    sampling: trajectory_pb2.SamplingSettings
    max_episode_tokens: int
    episode_timeout_s: float
    environment_targets: tuple[str, ...] = ()

    def request(
        self,
        fence: trajectory_pb2.Fence,
        attempt: int,
        episodes: list[int],
        required_version: weights_pb2.WeightVersion | None,
    ) -> rollout_pb2.RunGroupRequest:
        """Returns the request for some of the group's episodes."""
        timeout = Duration()
        timeout.FromNanoseconds(int(self.episode_timeout_s * 1e9))
        return rollout_pb2.RunGroupRequest(
            fence=fence,
            group_id=self.group_id,
            environment_tag=self.environment_tag,
            environment_seed=self.environment_seed,
            environment_options=self.environment_options,
            episodes=self.episodes,
            sampling_seed=self.sampling_seed,
            sampling=self.sampling,
            max_episode_tokens=self.max_episode_tokens,
            episode_timeout=timeout,
            required_version=required_version,
            attempt=attempt,
            episode_indices=episodes,
            environment_targets=self.environment_targets,
        )


@dataclass
class Tally:
    """Episodes requested, completed and failed: once nothing is in flight, requested = completed + failed."""

    requested: int = 0
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def in_flight(self) -> int:
        """Episodes without a result so far."""
        return self.requested - self.completed - self.failed.total()


class GroupProgress:
    """One group while it is played.

    Its episodes are requested all at once, attempt after attempt, or one by one as agents ask for them.

    Attributes:
        attempt: Attempts that were made.
        failures: Episodes that failed, in the order of their results.
        cause: Why it was given up, where that was not for failures.
        oldest_step: Step of the oldest weights that drew its tokens, where they may be older than the group's start.

    Args:
        plan: The group.
        max_attempts: Times that an episode may be requested.
        tally: Where episodes are counted.
    """

    def __init__(self, plan: GroupPlan, max_attempts: int, tally: Tally) -> None:
        self.plan = plan
        self.attempt = 0
        self.failures: list[trajectory_pb2.EpisodeFailure] = []
        self.cause = ""
        self.oldest_step: int | None = None
        self._max_attempts = max_attempts
        self._tally = tally
        self._results: dict[int, trajectory_pb2.Trajectory] = {}
        self._pending: dict[int, int] = {}  # by episode the attempt at it

    @classmethod
    def restored(
        cls, plan: GroupPlan, attempts: int, trajectories: Sequence[trajectory_pb2.Trajectory]
    ) -> GroupProgress:
        """Returns a complete group as the ledger has it; its episodes were counted when they were played."""
        progress = cls(plan, attempts, Tally())
        progress.attempt = attempts
        progress._results = {trajectory.episode_index: trajectory for trajectory in trajectories}
        return progress

    @property
    def missing(self) -> list[int]:
        """Indices of the episodes without a trajectory, ascending."""
        return [index for index in range(self.plan.episodes) if index not in self._results]

    @property
    def complete(self) -> bool:
        """True if every episode has a trajectory."""
        return len(self._results) == self.plan.episodes

    @property
    def unrequested(self) -> list[int]:
        """Indices of the episodes without a trajectory that are not being played, ascending."""
        return [index for index in self.missing if index not in self._pending]

    @property
    def in_attempt(self) -> int:
        """Number of episodes of the attempt in flight that have no result yet."""
        return len(self._pending)

    @property
    def exhausted(self) -> bool:
        """True if episodes are missing and no attempt is left."""
        return not self.complete and self.attempt >= self._max_attempts

    @property
    def trajectories(self) -> list[trajectory_pb2.Trajectory]:
        """Completed episodes in the order of their index."""
        return [self._results[index] for index in sorted(self._results)]

    def begin_attempt(self) -> list[int]:
        """Starts an attempt at all missing episodes and returns their indices."""
        assert not self._pending, "an attempt began while another one is in flight"
        self._pending = dict.fromkeys(self.missing, self.attempt)
        self._tally.requested += len(self._pending)
        return sorted(self._pending)

    def begin_episode(self, index: int) -> int:
        """Starts an attempt at one episode and returns its number."""
        assert index in self.unrequested, f"episode {index} was requested twice"
        attempt = sum(failure.episode_index == index for failure in self.failures)
        self._pending[index] = attempt
        self._tally.requested += 1
        self.attempt = max(self.attempt, attempt + 1)
        return attempt

    def has_attempts_left(self, index: int) -> bool:
        """Tells whether an episode may be requested again."""
        return sum(failure.episode_index == index for failure in self.failures) < self._max_attempts

    def adopt(self, trajectories: Sequence[trajectory_pb2.Trajectory], oldest_step: int) -> None:
        """Counts episodes that were played before the group was, as requested and completed.

        Args:
            trajectories: Checked trajectories of different episodes of the group.
            oldest_step: Step of the oldest weights that drew their tokens.
        """
        for trajectory in trajectories:
            assert trajectory.episode_index in self.unrequested, f"episode {trajectory.episode_index} arrived twice"
            self._results[trajectory.episode_index] = trajectory
            self.attempt = max(self.attempt, trajectory.attempt + 1)
        self._tally.requested += len(trajectories)
        self._tally.completed += len(trajectories)
        self.oldest_step = oldest_step

    def add(self, response: rollout_pb2.RunGroupResponse) -> None:
        """Counts one result.

        Raises:
            ProtocolError: The result does not belong to this attempt, or the trajectory contradicts itself.
        """
        if response.WhichOneof("result") == "trajectory":
            trajectory = response.trajectory
            self.check(trajectory)
            del self._pending[trajectory.episode_index]
            self._results[trajectory.episode_index] = trajectory
            self._tally.completed += 1
        else:
            self._fail(response.failure)

    def check(self, trajectory: trajectory_pb2.Trajectory) -> None:
        """Checks a trajectory without counting it. Raises `ProtocolError` as `add` does."""
        attempt = self._pending.get(trajectory.episode_index, self.attempt)
        check_trajectory(trajectory, self.plan.group_id, attempt, self._pending)

    def fail_pending(self, reason: Reason.ValueType, message: str) -> None:
        """Counts every episode of the attempt that has no result as failed."""
        for index in sorted(self._pending):
            self.fail_episode(index, reason, message)

    def fail_episode(self, index: int, reason: Reason.ValueType, message: str) -> None:
        """Counts an episode that is being played as failed."""
        failure = trajectory_pb2.EpisodeFailure(
            group_id=self.plan.group_id,
            episode_index=index,
            attempt=self._pending[index],
            environment_tag=self.plan.environment_tag,
            environment_seed=self.plan.environment_seed,
            reason=reason,
            message=message,
        )
        self._fail(failure)

    def withdraw(self) -> None:
        """Takes an attempt back that the server refused because it is full: nothing was played."""
        self._tally.requested -= len(self._pending)
        self._pending = {}

    def withdraw_episode(self, index: int) -> None:
        """Takes the request for one episode back that nobody played."""
        del self._pending[index]
        self._tally.requested -= 1

    def end_attempt(self) -> None:
        """Ends the attempt; every episode of it must have a result."""
        assert not self._pending, "requested = completed + failed does not hold"
        self.attempt += 1

    def _fail(self, failure: trajectory_pb2.EpisodeFailure) -> None:
        if failure.episode_index not in self._pending:
            raise ProtocolError(
                f"episode {failure.episode_index} of group {self.plan.group_id} failed but was not pending"
            )
        del self._pending[failure.episode_index]
        self.failures.append(failure)
        self._tally.failed[reason_name(failure.reason)] += 1
