"""Adapters behind the server: errors of a library are failures as data, wrong answers are rewards, nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.server import ServeError
from rollwire.v1 import environment_pb2 as pb

OPENENV_SERVER = Path(__file__).parents[2] / "support" / "openenv_guess.py"
LAKE = {
    "type": "gymnasium",
    "options": {
        "id": "FrozenLake-v1",
        "actions": ["Left", "Down", "Right", "Up"],
        "format_penalty": -0.2,
        "max_turns": 3,
    },
}


@pytest.fixture
def openenv() -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """A definition for a real OpenEnv server, and its process."""
    with subprocess.Popen([sys.executable, str(OPENENV_SERVER)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            options = {
                "url": f"http://127.0.0.1:{int(process.stdout.readline())}",
                "max_turns": 5,
                "action_field": "number",
                "action_type": "integer",
                "connect_timeout_s": 30,
            }
            yield {"type": "openenv", "options": options}, process
        finally:
            process.kill()


@pytest.mark.parametrize("answer", ["", "Left", "<answer>Jump</answer>", "<answer>" * 1000, "\0", "ü√" * 1000])
async def test_a_wrong_answer_is_a_reward_and_no_failure(serve: Any, opening: Any, answer: str) -> None:
    async with serve(definitions={"Lake": LAKE}) as client:
        opened = await client.open_session(opening("Lake"))
        replies = [await client.step(opened.session_id, turn, answer) for turn in range(3)]
        assert not any(reply.failure.kind for reply in replies)
        assert [reply.reward for reply in replies] == [-0.2] * 3
        assert [reply.truncated for reply in replies] == [False, False, True]


async def test_every_episode_on_a_server_that_is_killed_is_completed_or_failed(
    serve: Any, opening: Any, openenv: tuple[dict[str, Any], subprocess.Popen[str]]
) -> None:
    definition, process = openenv
    requested, outcomes = 12, Counter[str]()
    async with serve(definitions={"Guess": definition}, disable_after_failures=100) as client:
        for episode in range(requested):
            if episode == requested // 2:
                process.kill()
                process.wait()
            opened = await client.open_session(opening("Guess", seed=episode))
            reply: Any = opened
            for turn in range(5):
                if opened.failure.kind or reply.failure.kind:
                    break
                reply = await client.step(opened.session_id, turn, "1")
                if reply.terminated or reply.truncated:
                    break
            failure = opened.failure if opened.failure.kind else reply.failure
            outcomes[failure.type or "completed"] += 1
            assert failure.kind in (pb.ENVIRONMENT_FAILURE_KIND_UNSPECIFIED, pb.ENVIRONMENT_FAILURE_KIND_ERROR)
    assert outcomes == {"completed": requested // 2, "OpenEnvError": requested // 2}


async def test_an_environment_that_the_library_breaks_is_disabled(
    serve: Any, opening: Any, openenv: tuple[dict[str, Any], subprocess.Popen[str]]
) -> None:
    async with serve(definitions={"Guess": openenv[0]}, disable_after_failures=2) as client:
        for _ in range(2):
            opened = await client.open_session(opening("Guess"))
            reply = await client.step(opened.session_id, 0, "13")
            assert (reply.failure.type, reply.reward) == ("OpenEnvError", 0.0)
            assert "13 is unlucky" in reply.failure.message
        with pytest.raises(RollwireError) as caught:
            await client.open_session(opening("Guess"))
        assert caught.value.reason == Reason.ENVIRONMENT_DISABLED


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ({"type": "gymnasium"}, "environment.definitions.Mine.options.id is None; allowed: a value"),
        ({"type": "gymnasium", "options": {"id": "Nope-v0"}}, "Environment `Nope` doesn't exist"),
        ({"type": "reasoning_gym", "options": {"dataset": "nope"}}, "which reasoning-gym does not know"),
        ({"type": "openenv", "options": {"url": "x", "max_turns": 1}}, "allowed: http, https, ws or wss"),
        ({"type": "tools", "options": {"type": "tools"}}, "allowed: a type that is no wrapper"),
    ],
)
async def test_a_definition_that_does_not_fit_stops_the_server(serve: Any, definition: Any, says: str) -> None:
    with pytest.raises(ServeError) as caught:
        async with serve(definitions={"Mine": definition}):
            pass
    assert says in str(caught.value) and "\n" not in str(caught.value)


async def test_a_request_cannot_choose_what_the_configuration_chose(serve: Any, opening: Any) -> None:
    async with serve(definitions={"Lake": LAKE}) as client:
        for option in ({"id": "os:system"}, {"kwargs": {}}, {"action_pattern": "(a*)*b"}):
            with pytest.raises(RollwireError) as caught:
                await client.open_session(opening("Lake", **option))
            assert caught.value.reason == Reason.INVALID_FIELD
        opened = await client.open_session(opening("Lake", format_penalty=-0.7))
        assert (await client.step(opened.session_id, 0, "?")).reward == -0.7


async def test_types_are_no_tags(serve: Any, opening: Any) -> None:
    async with serve(definitions={}) as client:
        tags = [item.tag for item in (await client.list_environments()).environments]
        assert "SimpleSokoban" in tags and "gymnasium" not in tags
        with pytest.raises(RollwireError) as caught:
            await client.open_session(opening("gymnasium"))
        assert caught.value.reason == Reason.UNKNOWN_ENVIRONMENT
