"""Environments that raise, hang or return nonsense: data for the caller, harmless for everyone else (I9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.host import THREADS_PER_TAG
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2 as pb

Opening = Callable[..., pb.OpenSessionRequest]
ERROR = pb.ENVIRONMENT_FAILURE_KIND_ERROR
TIMEOUT = pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
INVALID = pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT

BAD_TURNS = [
    ("raise", ERROR, "ZeroDivisionError", "cannot divide <path> by zero"),
    ("exit", ERROR, "SystemExit", "3"),
    ("hang", TIMEOUT, "Timeout", "no answer within 1 s"),
    ("nan", INVALID, "InvalidResult", "the reward is nan; allowed: a finite number"),
    ("inf", INVALID, "InvalidResult", "the reward is inf; allowed: a finite number"),
    ("text reward", INVALID, "InvalidResult", "the reward is of type str; allowed: a number"),
    ("long", INVALID, "InvalidResult", "the observation has 2097152 bytes; allowed: at most 1048576"),
    ("surrogate", INVALID, "InvalidResult", "the observation holds a lone surrogate at character 0; allowed: UTF-8"),
    ("short tuple", INVALID, "InvalidResult", "step returned a tuple of 2; allowed: (observation,"),
    ("none", INVALID, "InvalidResult", "step returned a value of type NoneType; allowed: (observation,"),
    ("bad metric", INVALID, "InvalidResult", "a metric is named 'a b'; allowed: [A-Za-z0-9_./-]{1,128}"),
    ("nan metric", INVALID, "InvalidResult", "a is nan; allowed: a finite number"),
    ("many metrics", INVALID, "InvalidResult", "info['metrics'] has 300 entries; allowed: at most 256"),
    ("bad aggregation", INVALID, "InvalidResult", "metrics_agg_mode holds 'median' for 'a'; allowed: mean, sum"),
]


@pytest.mark.parametrize(("action", "kind", "type_name", "message"), BAD_TURNS, ids=[turn[0] for turn in BAD_TURNS])
async def test_a_failed_turn_is_data_and_ends_the_episode(
    client: EnvironmentClient, opening: Opening, action: str, kind: int, type_name: str, message: str
) -> None:
    opened = await client.open_session(opening("Troublesome"))
    reply = await client.step(opened.session_id, 0, action)
    assert (reply.failure.kind, reply.failure.type) == (kind, type_name)
    assert reply.failure.message.startswith(message)
    assert reply == pb.StepResponse(failure=reply.failure)  # no reward, no observation, nothing that could be trained
    assert await client.step(opened.session_id, 0, action) == reply
    with pytest.raises(RollwireError) as caught:
        await client.step(opened.session_id, 1, "a")
    assert caught.value.reason == Reason.EPISODE_ENDED
    await client.close_session(opened.session_id)


@pytest.mark.parametrize(
    ("how", "kind", "type_name"),
    [
        ("raise", ERROR, "ZeroDivisionError"),
        ("exit", ERROR, "SystemExit"),
        ("hang", TIMEOUT, "Timeout"),
        ("long", INVALID, "InvalidResult"),
    ],
)
async def test_a_failed_start_is_data_and_leaves_no_session(
    client: EnvironmentClient, opening: Opening, how: str, kind: int, type_name: str
) -> None:
    request = opening("Troublesome", start_with=how, request_id="once")
    answers = await asyncio.gather(*(client.open_session(request) for _ in range(3)))
    assert all(answer == pb.OpenSessionResponse(failure=answers[0].failure) for answer in answers)
    assert (answers[0].failure.kind, answers[0].failure.type) == (kind, type_name)
    assert (await client.list_environments()).open_sessions == 0


PATIENT = {"Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": 60}}


async def test_a_hanging_environment_delays_nobody_else(serve: Any, opening: Opening, troublesome: Any) -> None:
    async with serve(definitions=PATIENT) as client:
        hanging = [await client.open_session(opening("Troublesome")) for _ in range(8)]
        steps = [asyncio.create_task(client.step(opened.session_id, 0, "hang")) for opened in hanging]
        for tag in ("FrozenLake", "Troublesome"):
            opened = await client.open_session(opening(tag))
            for turn in range(2):
                assert not (await client.step(opened.session_id, turn, "a")).HasField("failure")
        assert not any(task.done() for task in steps)
        troublesome.release.set()
        assert [(await task).observation for task in steps] == ["1: hang"] * 8


async def test_repeats_of_a_hanging_turn_share_the_timeout(client: EnvironmentClient, opening: Opening) -> None:
    opened = await client.open_session(opening("Troublesome"))
    replies = await asyncio.gather(*(client.step(opened.session_id, 0, "hang") for _ in range(4)))
    assert all(reply == replies[0] for reply in replies)
    assert replies[0].failure.kind == TIMEOUT


async def test_more_hanging_turns_than_threads_fail_all_alike(serve: Any, opening: Opening) -> None:
    definitions = {"Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": 0.5}}
    async with serve(definitions=definitions, disable_after_failures=10_000) as client:
        opened = await asyncio.gather(
            *(client.open_session(opening("Troublesome")) for _ in range(THREADS_PER_TAG + 10))
        )
        replies = await asyncio.gather(*(client.step(item.session_id, 0, "hang") for item in opened))
        assert {reply.failure.kind for reply in replies} == {TIMEOUT}
        refused = [reply for reply in replies if "restart the server" in reply.failure.message]
        assert len(refused) == 10
        lake = await client.open_session(opening("FrozenLake"))
        assert not (await client.step(lake.session_id, 0, "<answer>Left</answer>")).HasField("failure")


async def test_repeated_failures_disable_the_tag_and_no_other(
    serve: Any, opening: Opening, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(disable_after_failures=3) as client:
        survivor = await client.open_session(opening("Troublesome"))
        for how in ("start", "turn", "start"):
            if how == "start":
                assert (await client.open_session(opening("Troublesome", start_with="raise"))).HasField("failure")
            else:
                opened = await client.open_session(opening("Troublesome"))
                await client.step(opened.session_id, 0, "nan")
        with pytest.raises(RollwireError) as caught:
            await client.open_session(opening("Troublesome"))
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.reason == Reason.ENVIRONMENT_DISABLED
        assert "3 episodes in a row failed, the last one with" in caught.value.message
        assert "environment disabled until the server restarts" in "".join(capsys.readouterr())
        assert "Troublesome" not in [item.tag for item in (await client.list_environments()).environments]
        assert not (await client.step(survivor.session_id, 0, "a")).HasField("failure")
        for tag in ("Counting", "FrozenLake"):
            assert not (await client.open_session(opening(tag))).HasField("failure")


async def test_an_episode_that_ends_well_clears_the_count(serve: Any, opening: Opening) -> None:
    async with serve(disable_after_failures=2) as client:
        for _ in range(3):
            assert (await client.open_session(opening("Troublesome", start_with="raise"))).HasField("failure")
            opened = await client.open_session(opening("Troublesome"))
            assert (await client.step(opened.session_id, 0, "stop")).terminated


async def test_options_that_the_constructor_refuses_are_the_caller_s_mistake(serve: Any, opening: Opening) -> None:
    async with serve(disable_after_failures=2) as client:
        for tag, options in [("Counting", {"limit": 101}), ("FrozenLake", {"size": 1})] * 3:
            with pytest.raises(RollwireError) as caught:
                await client.open_session(opening(tag, **options))
            assert (caught.value.code, caught.value.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                Reason.INVALID_FIELD,
            )
            assert list(caught.value.fields) == ["options"]
            assert "allowed: " in caught.value.message
        assert (await client.open_session(opening("Counting"))).session_id


@pytest.mark.parametrize("note", ["raise", "hang", "bad picture"])
async def test_a_drawing_that_fails_is_unsupported(client: EnvironmentClient, opening: Opening, note: str) -> None:
    opened = await client.open_session(opening("Troublesome", note=note))
    with pytest.raises(RollwireError) as caught:
        await client.render(opened.session_id, pb.RENDER_FORMAT_PNG)
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        Reason.RENDER_UNSUPPORTED,
    )
    reply = await client.step(opened.session_id, 0, "a")
    # A thread still hangs in the environment: it must not be touched again.
    assert reply.failure.kind == (TIMEOUT if note == "hang" else pb.ENVIRONMENT_FAILURE_KIND_UNSPECIFIED)


async def test_hanging_drawings_delay_no_other_tag(serve: Any, opening: Opening, troublesome: Any) -> None:
    async with serve(definitions=PATIENT) as client:
        hanging = [await client.open_session(opening("Troublesome", note="hang")) for _ in range(4)]
        draws = [asyncio.create_task(client.render(item.session_id, pb.RENDER_FORMAT_TEXT)) for item in hanging]
        lake = await client.open_session(opening("FrozenLake"))
        assert (await client.render(lake.session_id, pb.RENDER_FORMAT_TEXT)).text == lake.observation
        assert not any(task.done() for task in draws)
        troublesome.release.set()
        assert [(await task).text for task in draws] == ["count 0"] * 4


async def test_the_log_holds_the_stack_trace_that_the_caller_does_not_get(
    client: EnvironmentClient, opening: Opening, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = await client.open_session(opening("Troublesome"))
    reply = await client.step(opened.session_id, 0, "raise")
    logged = "".join(capsys.readouterr())
    assert "secret.txt" in logged
    assert "secret.txt" not in str(reply)
    assert "misbehave" in logged
    assert "misbehave" not in str(reply)


@pytest.mark.parametrize(("how", "kind"), [("raise", ERROR), ("exit", ERROR), ("long", INVALID)])
async def test_an_environment_that_fails_to_start_is_closed(
    client: EnvironmentClient, opening: Opening, troublesome: Any, how: str, kind: int
) -> None:
    opened = await client.open_session(opening("Troublesome", start_with=how, start=7))
    assert opened.failure.kind == kind
    assert troublesome.log.count("closed at 7") == 1


async def test_what_was_given_up_is_closed_when_it_comes_back(
    client: EnvironmentClient, opening: Opening, troublesome: Any
) -> None:
    opened = await client.open_session(opening("Troublesome", start_with="hang", start=7))
    assert opened.failure.kind == TIMEOUT
    playing = await client.open_session(opening("Troublesome", start=20))
    assert (await client.step(playing.session_id, 0, "hang")).failure.kind == TIMEOUT
    await client.close_session(playing.session_id)
    assert not {"closed at 7", "closed at 20", "closed at 21"} & set(troublesome.log)
    troublesome.release.set()
    async with asyncio.timeout(60):
        while not {"closed at 7", "closed at 21"} <= set(troublesome.log):
            await asyncio.sleep(0.01)
    assert troublesome.log.count("closed at 7") == troublesome.log.count("closed at 21") == 1
