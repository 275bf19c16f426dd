"""Tables of the ledger and the rows that go into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rollwire.v1 import trajectory_pb2, weights_pb2

FORMAT_VERSION: Final = 2
"""Raised when another build could not go on with the file any more; 2 brought what a resumed run needs."""

GroupState = Literal["accepted", "consumed", "failed", "stale"]
"""`accepted` waits for its step, `consumed` was in one, `failed` ran out of attempts, `stale` was too old to train."""

SCHEMA: Final = (
    """
    CREATE TABLE run (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        run_id TEXT NOT NULL,
        name TEXT NOT NULL,
        epoch INTEGER NOT NULL CHECK (epoch >= 1),
        format_version INTEGER NOT NULL,
        config TEXT NOT NULL,
        created TEXT NOT NULL,
        event_dir TEXT NOT NULL,
        working_dir TEXT NOT NULL,
        state TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE groups (
        group_id TEXT PRIMARY KEY,
        group_index INTEGER NOT NULL UNIQUE,
        environment_tag TEXT NOT NULL,
        environment_seed INTEGER NOT NULL,
        sampling_seed INTEGER NOT NULL,
        attempts INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('accepted', 'consumed', 'failed', 'stale'))
    )
    """,
    """
    CREATE TABLE trajectories (
        trajectory_id TEXT PRIMARY KEY,
        group_id TEXT NOT NULL REFERENCES groups (group_id),
        episode_index INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        score REAL NOT NULL,
        accepted_step INTEGER NOT NULL,
        record BLOB,
        UNIQUE (group_id, episode_index)
    )
    """,
    """
    CREATE TABLE failures (
        group_id TEXT NOT NULL REFERENCES groups (group_id),
        episode_index INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        reason TEXT NOT NULL,
        message TEXT NOT NULL,
        turn INTEGER NOT NULL,
        PRIMARY KEY (group_id, episode_index, attempt)
    )
    """,
    """
    CREATE TABLE steps (
        lineage TEXT NOT NULL,
        step INTEGER NOT NULL,
        version_before INTEGER NOT NULL,
        version_after INTEGER,
        digest BLOB NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('planned', 'committed')),
        metrics TEXT,
        weights_digest BLOB,
        progress TEXT,
        PRIMARY KEY (lineage, step)
    )
    """,
    """
    CREATE TABLE step_trajectories (
        lineage TEXT NOT NULL,
        trajectory_id TEXT NOT NULL REFERENCES trajectories (trajectory_id),
        step INTEGER NOT NULL,
        trained INTEGER NOT NULL CHECK (trained IN (0, 1)),
        PRIMARY KEY (lineage, trajectory_id),
        FOREIGN KEY (lineage, step) REFERENCES steps (lineage, step)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE versions (
        lineage TEXT NOT NULL,
        step INTEGER NOT NULL,
        target TEXT NOT NULL,
        digest BLOB NOT NULL,
        received_bytes INTEGER NOT NULL,
        fetch_s REAL NOT NULL,
        pause_s REAL NOT NULL,
        PRIMARY KEY (lineage, step, target)
    )
    """,
    """
    CREATE TABLE validations (
        kind TEXT NOT NULL,
        step INTEGER NOT NULL,
        environment_tag TEXT NOT NULL,
        start_index INTEGER NOT NULL,
        environment_seed INTEGER NOT NULL,
        score REAL NOT NULL,
        PRIMARY KEY (kind, step, environment_tag, start_index)
    )
    """,
    """
    CREATE TABLE checkpoints (
        name TEXT PRIMARY KEY,
        step INTEGER NOT NULL,
        lineage TEXT NOT NULL,
        version INTEGER NOT NULL,
        digest BLOB NOT NULL,
        path TEXT NOT NULL,
        bytes INTEGER NOT NULL
    )
    """,
    "CREATE INDEX trajectories_by_step ON trajectories (accepted_step)",
    "CREATE INDEX step_trajectories_by_step ON step_trajectories (lineage, step)",
)


@dataclass(frozen=True)
class RunRecord:
    """A new run.

    Attributes:
        run_id: Identifier.
        name: Name as configured.
        config: Resolved configuration as YAML.
        created: When, as ISO 8601.
        event_dir: Directory of event files.
        working_dir: What relative paths of the configuration are relative to.
    """

    run_id: str
    name: str
    config: str
    created: str
    event_dir: str
    working_dir: str


@dataclass(frozen=True)
class Progress:
    """What a run has done up to a step, and what its next step depends on beside the weights.

    Attributes:
        samples: Trajectories consumed.
        trained: Those of them that entered an optimizer step.
        tokens: Tokens of those consumed.
        kl_coefficient: Coefficient of the divergence in the next step.
    """

    samples: int = 0
    trained: int = 0
    tokens: int = 0
    kl_coefficient: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        step: Number of the step.
        lineage: Lineage of the weights.
        version_after: Step of the version reached; the version before when nothing was trained.
        weights_digest: Digest of that version.
        metrics: What batch and learner reported.
        progress: What the run has done with it.
    """

    step: int
    lineage: str
    version_after: int
    weights_digest: bytes
    metrics: Mapping[str, float]
    progress: Progress


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that the learner holds.

    Attributes:
        name: Its name.
        step: Training steps done.
        version: Version that it holds.
        digest: SHA-256 of its manifest.
        path: Where it is on the learner's host.
        size: Bytes of its files.
    """

    name: str
    step: int
    version: weights_pb2.WeightVersion
    digest: bytes
    path: str
    size: int


@dataclass(frozen=True)
class GroupRecord:
    """A finished group."""

    group_id: str
    index: int
    environment_tag: str
    environment_seed: int
    sampling_seed: int
    attempts: int
    trajectories: Sequence[trajectory_pb2.Trajectory]
    failures: Sequence[trajectory_pb2.EpisodeFailure]


@dataclass(frozen=True)
class StepPlan:
    """What a step is about to train.

    Attributes:
        step: Number of the step, from 0.
        base: Version that it starts from.
        digest: Digest of the batch; 32 bytes.
        trained: Ids of the trajectories that enter the step.
        filtered: Ids of the trajectories that are consumed without entering it.
    """

    step: int
    base: weights_pb2.WeightVersion
    digest: bytes
    trained: Sequence[str]
    filtered: Sequence[str]


@dataclass(frozen=True)
class VersionRecord:
    """A version that one rollout server activated."""

    version: weights_pb2.WeightVersion
    target: str
    digest: bytes
    received_bytes: int
    fetch_s: float
    pause_s: float


@dataclass(frozen=True)
class ValidationRecord:
    """One validation episode."""

    kind: str
    step: int
    environment_tag: str
    start_index: int
    environment_seed: int
    score: float
