"""Checkpoint directories: there as a whole or not at all, whatever happens to the process."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from rollwire.learner.checkpoint_files import CheckpointDirectory, describe_file, write_state
from rollwire.learner.checkpoint_manifest import new_manifest
from rollwire.rpc.errors import RollwireError
from rollwire.v1.weights_pb2 import WeightVersion


def write(directory: CheckpointDirectory, name: str, *, run_id: str = "run", die: bool = False) -> None:
    """Writes a checkpoint with one file; dies right before the rename if asked to."""
    with directory.writing(name) as partial:
        write_state(partial, {"name": name})
        manifest = new_manifest(
            name, run_id, WeightVersion(lineage="line", step=1), {"state.json": describe_file(partial / "state.json")}
        )
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        directory.publish(manifest)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints")


def test_a_writer_that_is_killed_leaves_a_leftover_and_what_was_there(directory: CheckpointDirectory) -> None:
    write(directory, "one")
    child = os.fork()
    if child == 0:
        write(directory, "two", die=True)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert directory.names() == ["one"]
    assert directory.partial("two").exists()
    assert directory.remove_leftovers() == [".two.partial"]
    assert [path.name for path in directory.root.iterdir()] == ["one"]
    directory.check(directory.read("one"))


def test_leftovers_stay_while_another_learner_writes(directory: CheckpointDirectory) -> None:
    with directory.writing("one") as partial:
        assert directory.remove_leftovers() == []
        assert partial.exists()
    assert not partial.exists(), "what is not published is removed"


def test_a_file_system_without_locks_takes_checkpoints_and_keeps_leftovers(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("rollwire.learner.checkpoint_files.fcntl.flock", refused)
    write(directory, "one")
    directory.check(directory.read("one"))
    directory.partial("two").mkdir()
    assert directory.remove_leftovers() == []
    assert directory.partial("two").exists(), "another learner may be writing it"


def test_the_newest_ones_of_a_run_stay_whatever_their_names(directory: CheckpointDirectory) -> None:
    for name in ("z", "b", "a"):
        write(directory, name)
    write(directory, "other", run_id="another-run")
    assert directory.prune("run", 2, newest="a") == ["z"]
    assert directory.names() == ["a", "b", "other"]
    assert directory.prune("run", 1, newest="a") == ["b"]
    assert directory.prune("run", 1, newest="a") == []


def test_the_one_written_last_stays_although_the_clock_was_set_back(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, "one")
    write(directory, "two")
    monkeypatch.setattr("rollwire.learner.checkpoint_manifest.time.time_ns", lambda: 1)
    write(directory, "three")
    assert directory.prune("run", 2, newest="three") == ["one"]
    assert directory.names() == ["three", "two"]


def test_tensors_that_the_manifest_does_not_know_are_refused(directory: CheckpointDirectory) -> None:
    write(directory, "one")
    (directory.path("one") / "notes.txt").write_text("mine")
    directory.check(directory.read("one"))
    (directory.path("one") / "copy-of-shard.safetensors").write_bytes(b"")
    with pytest.raises(RollwireError, match=r"damaged: copy-of-shard\.safetensors is not in its manifest") as raised:
        directory.check(directory.read("one"))
    assert raised.value.reason == "CHECKPOINT_CORRUPT"


def test_a_damaged_one_is_replaced_as_a_whole(directory: CheckpointDirectory) -> None:
    write(directory, "one")
    (directory.path("one") / "state.json").write_text("{}")
    with pytest.raises(RollwireError, match=r"checkpoint one is damaged: state\.json has 2 bytes instead of 14"):
        directory.check(directory.read("one"))
    write(directory, "one")
    directory.check(directory.read("one"))
    assert directory.names() == ["one"] and len(list(directory.root.iterdir())) == 1


def test_a_checkpoint_of_a_newer_build_is_refused(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollwire.learner.checkpoint_manifest.FORMAT", 2)
    write(directory, "one")
    monkeypatch.undo()
    with pytest.raises(RollwireError, match="checkpoint one has format 2; this build reads formats up to 1") as raised:
        directory.read("one")
    assert raised.value.reason == "CHECKPOINT_MISMATCH"
