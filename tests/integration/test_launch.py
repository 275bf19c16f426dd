"""`rollwire launch`: environment, rollout, learner and coordinator as real processes over gRPC."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollwire.rpc.digests import weights_digest
from rollwire.v1 import trajectory_pb2

from .conftest import EXAMPLE, Run, rollwire

STEPS, GROUPS, EPISODES = 3, 4, 4
SCALARS = (
    "time/step_total",
    "time/step_rollout",
    "time/step_train",
    "time/step_model_update",
    "system/samples",
    "system/tps",
    "critic/score/mean",
    "critic/advantages/mean",
    "actor/pg_loss",
    "actor_train/grad_norm",
    "actor/lr",
    "tokens/response_length/mean",
    "env/FrozenLake/success",
    "env/FrozenLake/action_is_valid",
    "weights/sync_bytes",
)


def _records(run: Run) -> list[trajectory_pb2.Trajectory]:
    rows = run.query("SELECT record FROM trajectories ORDER BY group_id, episode_index")
    return [trajectory_pb2.Trajectory.FromString(blob) for (blob,) in rows]


def test_the_ledger_holds_every_step_and_each_trajectory_once(launched: Run) -> None:
    """I1, I2, I6: complete groups, each trajectory in at most one committed step."""
    steps = launched.query("SELECT step, version_before, version_after, state FROM steps ORDER BY step")
    assert [(before, after, state) for _, before, after, state in steps] == [
        (index, index + 1, "committed") for index in range(STEPS)
    ]
    assert launched.query("SELECT COUNT(*), COUNT(DISTINCT trajectory_id) FROM step_trajectories") == [
        (STEPS * GROUPS * EPISODES,) * 2
    ]
    sizes = launched.query("SELECT COUNT(*) FROM trajectories GROUP BY group_id")
    assert sizes == [(EPISODES,)] * (STEPS * GROUPS)
    assert launched.query("SELECT state FROM run") == [("finished",)]


def test_trajectories_are_whole_and_say_which_weights_drew_them(launched: Run) -> None:
    """I3: every sampled token has one version, and with max_staleness 0 it is the version of its step."""
    lineages = set()
    for index, record in enumerate(_records(launched)):
        assert len(record.tokenizer_hash) == len(record.template_hash) == 64
        assert record.score == pytest.approx(sum(turn.reward for turn in record.turns))
        for sequence in record.sequences:
            length = len(sequence.token_ids)
            assert len(sequence.loss_mask) == len(sequence.logprobs) == length
            spanned = [p for span in sequence.version_spans for p in range(span.range.begin, span.range.end)]
            assert spanned == [p for p in range(length) if sequence.loss_mask[p]]
            lineages |= {span.version.lineage for span in sequence.version_spans}
            assert {span.version.step for span in sequence.version_spans} == {index // (GROUPS * EPISODES)}
    assert len(lineages) == 1


def test_event_file_holds_rolls_scalars(launched: Run) -> None:
    (event_dir,) = (launched.output_dir / "tensorboard" / "frozenlake-tiny").iterdir()
    events = EventAccumulator(str(event_dir), size_guidance={"scalars": 0})
    events.Reload()
    found = set(events.Tags()["scalars"])
    assert set(SCALARS) <= found
    assert len(events.Scalars("time/step_total")) == STEPS
    assert [point.value for point in events.Scalars("system/samples")] == [16.0, 32.0, 48.0]
    assert len(events.Scalars("val/score/mean")) == 2
    assert events.Tags()["tensors"], "no text samples"


def test_weights_served_are_the_weights_trained(launched: Run) -> None:
    """The digest that the rollout server computed from its engine is the digest of what the learner exported."""
    served = launched.query("SELECT step, digest FROM versions ORDER BY step")
    assert [step for step, _ in served] == list(range(STEPS + 1))
    assert len({digest for _, digest in served}) == STEPS + 1, "training changed nothing"
    exported = load_file(launched.path / "export" / "final" / "model.safetensors")
    tensors = [(name, blake3(tensor.tobytes()).digest()) for name, tensor in exported.items()]
    assert served[-1][1] == weights_digest(tensors)


def test_engine_and_learner_agree_on_logprobs(launched: Run) -> None:
    lines = [json.loads(line) for line in (launched.path / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["actor/logprob_gap_max"] for line in lines if "actor/logprob_gap_max" in line]
    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4


def test_the_viewer_that_the_summary_names_starts() -> None:
    command = [sys.executable, "-m", "tensorboard.main", "--version_tb"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr


def test_the_summary_names_the_places(launched: Run) -> None:
    assert str(launched.path) in launched.stdout
    assert "tensorboard --logdir" in launched.stdout
    assert "validation success, FrozenLake" in launched.stdout


def test_a_start_that_fails_is_one_line_and_leaves_no_run_directory(tmp_path: Path) -> None:
    done = rollwire("launch", EXAMPLE, f"run.output_dir={tmp_path}", "rollout.max_episode_tokens=1000000")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "rollout server ended with status 1: rollout.max_episode_tokens is 1000000" in line
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_run_bit_for_bit(launched: Run, launch_again: Callable[..., Run]) -> None:
    """I7: identical trajectories and identical weights over three steps."""

    def content(run: Run) -> list[tuple[list[int], list[float], float]]:
        return [
            (list(sequence.token_ids), list(sequence.logprobs), record.score)
            for record in _records(run)
            for sequence in record.sequences
        ]

    again = launch_again()
    assert content(again) == content(launched)
    digests = "SELECT step, digest FROM versions ORDER BY step"
    assert again.query(digests) == launched.query(digests)
    other = launch_again_with_seed(launch_again)
    assert content(other) != content(launched)


def launch_again_with_seed(launch_again: Callable[..., Run]) -> Run:
    return launch_again("run.seed=7", "run.name=other", "run.max_steps=1")
