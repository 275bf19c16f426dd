"""Texts of refusals: the cause first, and one thing to do at the end."""

from __future__ import annotations

import pytest

from rollwire.client.results import failure
from rollwire.coordinator.budgets import explain
from rollwire.environment.health import TagHealth
from rollwire.environment.refusals import refused_options
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import trajectory_pb2


def test_the_cause_comes_before_the_options() -> None:
    text = refused_options({"map": "x" * 1000}, "map has 1000 characters; allowed: at most 64").message
    assert text.startswith(
        "the environment refuses the options: map has 1000 characters; allowed: at most 64; they were {"
    )
    assert len(text) < 330


def test_a_disabled_tag_says_once_what_to_do() -> None:
    health = TagHealth("Mine", 1)
    health.failed(failure(pb.ENVIRONMENT_FAILURE_KIND_ERROR, "KeyError", "'key'"))
    with pytest.raises(RollwireError) as found:
        health.check()
    text = explain([trajectory_pb2.EpisodeFailure(message=found.value.message)])
    assert (
        "the last one with KeyError: 'key'; it stays so until the environment server restarts; the servers' logs"
        in text
    )
    assert text.count("mend") == 1
