"""Sessions over the wire: opening, turns, leases, closing, and repeats of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.frozen_lake import INSTRUCTIONS
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2 as pb

Opening = Callable[..., pb.OpenSessionRequest]


async def refused(call: Any, code: grpc.StatusCode, reason: Reason) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        await call
    assert (caught.value.code, caught.value.reason) == (code, reason), caught.value
    return caught.value


async def open_sessions(client: EnvironmentClient) -> int:
    return (await client.list_environments()).open_sessions


async def test_an_episode_of_frozen_lake(client: EnvironmentClient, opening: Opening) -> None:
    opened = await client.open_session(opening(seed=42))
    assert opened.observation == "__P_\n_O__\n___O\nGO__"
    assert (opened.instructions, opened.max_turns, opened.lease.seconds) == (INSTRUCTIONS, 10, 60)
    moves = ["Left", "nonsense", "Left", "Down", "Down"]
    replies = []
    for turn, move in enumerate(moves):
        replies.append(await client.step(opened.session_id, turn, f"<answer>{move}</answer>"))
    assert [reply.reward for reply in replies] == [0.0, -0.01, 0.0, 0.0, 0.0]
    assert [reply.metrics["action_is_valid"] for reply in replies] == [1.0, 0.0, 1.0, 1.0, 1.0]
    last = await client.step(opened.session_id, 5, "<answer>Down</answer>")
    assert (last.observation, last.reward, last.terminated, last.truncated) == (
        "____\n_O__\n___O\n√O__",
        1.0,
        True,
        False,
    )
    assert last.metrics["success"] == 1.0
    await client.close_session(opened.session_id)
    assert await open_sessions(client) == 0


async def test_the_same_seed_and_options_start_the_same_episode(client: EnvironmentClient, opening: Opening) -> None:
    starts = [await client.open_session(opening(seed=2**64 - 1, size=8, is_slippery=True)) for _ in range(2)]
    assert starts[0].observation == starts[1].observation
    assert starts[0].session_id != starts[1].session_id
    replies = [await client.step(start.session_id, 0, "<answer>Down</answer>") for start in starts]
    assert replies[0] == replies[1]


async def test_a_repeated_opening_returns_the_first_answer(client: EnvironmentClient, opening: Opening) -> None:
    request = opening("Troublesome", request_id="once", start_with="slow")
    answers = await asyncio.gather(*(client.open_session(request) for _ in range(5)))
    answers.append(await client.open_session(request))
    assert all(answer == answers[0] for answer in answers)
    assert await open_sessions(client) == 1


async def test_a_request_id_with_other_content_is_refused(client: EnvironmentClient, opening: Opening) -> None:
    await client.open_session(opening(seed=1, request_id="once"))
    error = await refused(
        client.open_session(opening(seed=2, request_id="once")), grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD
    )
    assert list(error.fields) == ["request_id"]


async def test_after_closing_a_request_id_opens_a_new_session(client: EnvironmentClient, opening: Opening) -> None:
    first = await client.open_session(opening(request_id="once"))
    await client.close_session(first.session_id)
    second = await client.open_session(opening(request_id="once"))
    assert second.session_id != first.session_id


@pytest.mark.parametrize("tag", ["Counting", "FrozenLake"])
async def test_a_repeated_turn_is_not_played_again(client: EnvironmentClient, opening: Opening, tag: str) -> None:
    opened = await client.open_session(opening(tag))
    first = await client.step(opened.session_id, 0, "<answer>Left</answer>")
    repeat = await client.step(opened.session_id, 0, "<answer>Right</answer>")
    assert repeat == first
    assert not (await client.step(opened.session_id, 1, "<answer>Left</answer>")).HasField("failure")


async def test_repeats_that_arrive_during_a_turn_share_its_result(
    client: EnvironmentClient, opening: Opening, troublesome: Any
) -> None:
    opened = await client.open_session(opening("Troublesome"))
    replies = await asyncio.gather(*(client.step(opened.session_id, 0, "slow") for _ in range(5)))
    assert troublesome.log.count("slow turn") == 1
    assert all(reply == replies[0] for reply in replies)
    assert replies[0].observation == "1: slow"


async def test_a_turn_whose_caller_gave_up_is_played_to_its_end(
    client: EnvironmentClient, opening: Opening, troublesome: Any
) -> None:
    opened = await client.open_session(opening("Troublesome"))
    await refused(
        client.step(opened.session_id, 0, "slow", timeout_s=0.05), grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TRANSPORT
    )
    assert (await client.step(opened.session_id, 0, "slow")).observation == "1: slow"
    assert troublesome.log.count("slow turn") == 1


async def test_the_next_turn_has_to_wait_for_the_one_being_played(
    serve: Any, opening: Opening, troublesome: Any
) -> None:
    patient = {"Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": 60}}
    async with serve(definitions=patient) as client, asyncio.timeout(60):
        opened = await client.open_session(opening("Troublesome"))
        playing = asyncio.create_task(client.step(opened.session_id, 0, "hang"))
        while "hanging" not in troublesome.log:
            await asyncio.sleep(0.01)
        await refused(client.step(opened.session_id, 1, "a"), grpc.StatusCode.FAILED_PRECONDITION, Reason.WRONG_TURN)
        troublesome.release.set()
        assert (await playing).observation == "1: hang"
        assert (await client.step(opened.session_id, 1, "a")).observation == "2: a"


@pytest.mark.parametrize("turn", [0, 3, 2**32 - 1])
async def test_a_wrong_turn_names_the_right_one(client: EnvironmentClient, opening: Opening, turn: int) -> None:
    opened = await client.open_session(opening())
    for played in range(2):
        await client.step(opened.session_id, played, "wait")
    error = await refused(
        client.step(opened.session_id, turn, "a"), grpc.StatusCode.FAILED_PRECONDITION, Reason.WRONG_TURN
    )
    assert error.metadata == {"turn": str(turn), "next_turn": "2"}


async def test_after_the_end_only_the_last_reply_remains(client: EnvironmentClient, opening: Opening) -> None:
    opened = await client.open_session(opening("Counting"))
    last = await client.step(opened.session_id, 0, "stop")
    assert last.terminated
    await refused(client.step(opened.session_id, 1, "a"), grpc.StatusCode.FAILED_PRECONDITION, Reason.EPISODE_ENDED)
    assert await client.step(opened.session_id, 0, "stop") == last


async def test_the_server_truncates_at_the_turn_limit(client: EnvironmentClient, opening: Opening) -> None:
    opened = await client.open_session(opening("Counting", limit=2))
    assert opened.max_turns == 2
    assert not (await client.step(opened.session_id, 0, "a")).truncated
    last = await client.step(opened.session_id, 1, "a")
    assert (last.truncated, last.terminated, last.reward) == (True, False, 0.25)
    await refused(client.step(opened.session_id, 2, "a"), grpc.StatusCode.FAILED_PRECONDITION, Reason.EPISODE_ENDED)


async def test_texts_of_a_custom_environment_arrive(client: EnvironmentClient, opening: Opening) -> None:
    opened = await client.open_session(opening("Counting", seed=7, note="√ \x00\x1b\u202e"))
    assert (opened.observation, opened.instructions, opened.suffix) == ("seed 7 √ \x00\x1b\u202e", "count", "?")
    reply = await client.step(opened.session_id, 0, "\x00\r\n\x07 ünï √")
    assert (reply.observation, reply.suffix) == ("1: \x00\r\n\x07 ünï √", "!")
    assert dict(reply.metrics) == {"turn": 1.0, "late": 1.0}


async def test_an_expired_lease_ends_the_session(
    client: EnvironmentClient, opening: Opening, clock: Any, troublesome: Any
) -> None:
    opened = await client.open_session(opening("Counting", lease_s=5))
    clock.now += 4.9
    await client.step(opened.session_id, 0, "a")  # renews
    clock.now += 4.9
    await client.render(opened.session_id, pb.RENDER_FORMAT_TEXT)  # renews, too
    clock.now += 4.9
    await client.renew_session(opened.session_id)
    clock.now += 5
    for call in (
        client.step(opened.session_id, 1, "a"),
        client.renew_session(opened.session_id),
        client.render(opened.session_id, pb.RENDER_FORMAT_TEXT),
    ):
        await refused(call, grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_SESSION)
    async with asyncio.timeout(10):
        while await open_sessions(client):  # the reaper comes every second
            await asyncio.sleep(0.05)
        while troublesome.log != ["closed at 1"]:
            await asyncio.sleep(0.05)


async def test_a_lease_can_be_changed(client: EnvironmentClient, opening: Opening, clock: Any) -> None:
    opened = await client.open_session(opening(lease_s=1.5))
    assert opened.lease.ToMilliseconds() == 1500
    stub, request = client._stub, pb.RenewSessionRequest(session_id=opened.session_id)
    request.lease.FromSeconds(3600)
    assert (await stub.RenewSession(request, timeout=5)).lease.seconds == 3600
    clock.now += 3599
    assert (await client.renew_session(opened.session_id)).lease.seconds == 3600


async def test_closing_is_idempotent_and_frees_the_environment(
    client: EnvironmentClient, opening: Opening, troublesome: Any
) -> None:
    opened = await client.open_session(opening("Counting"))
    for _ in range(3):
        await client.close_session(opened.session_id)
    await client.close_session("never existed")
    await client.close_session("")
    await refused(client.step(opened.session_id, 0, "a"), grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_SESSION)
    async with asyncio.timeout(5):
        while troublesome.log != ["closed at 0"]:
            await asyncio.sleep(0.01)


async def test_closing_during_a_turn_closes_the_environment_after_it(
    client: EnvironmentClient, opening: Opening, troublesome: Any
) -> None:
    opened = await client.open_session(opening("Troublesome"))
    playing = asyncio.create_task(client.step(opened.session_id, 0, "slow"))
    while "slow turn" not in troublesome.log:
        await asyncio.sleep(0.01)
    await client.close_session(opened.session_id)
    assert (await playing).observation == "1: slow"
    async with asyncio.timeout(5):
        while troublesome.log[-1] != "closed at 1":
            await asyncio.sleep(0.01)


async def test_stopping_the_server_closes_environments(serve: Any, opening: Opening, troublesome: Any) -> None:
    async with serve() as client:
        for _ in range(3):
            await client.open_session(opening("Counting"))
    assert troublesome.log == ["closed at 0"] * 3


async def test_capacity_is_bounded_and_comes_back(serve: Any, opening: Opening, clock: Any) -> None:
    async with serve(max_sessions=2) as client:
        first = await client.open_session(opening())
        await client.open_session(opening(lease_s=1))
        error = await refused(
            client.open_session(opening()), grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.SESSIONS_EXHAUSTED
        )
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        await client.close_session(first.session_id)
        await client.open_session(opening())
        clock.now += 2  # the lease of one second is over, and its place is free at once
        await client.open_session(opening())


async def test_a_thousand_sessions_at_once(serve: Any, opening: Opening) -> None:
    async with serve(max_sessions=1000) as client:

        async def episode(number: int) -> float:
            opened = await client.open_session(opening(seed=number, max_steps=4))
            total, turn, reply = 0.0, 0, pb.StepResponse()
            while not (reply.terminated or reply.truncated):
                reply = await client.step(opened.session_id, turn, f"<answer>{['Right', 'Down'][turn % 2]}</answer>")
                assert not reply.HasField("failure")
                total, turn = total + reply.reward, turn + 1
            return total

        scores = await asyncio.gather(*map(episode, range(1000)))
        assert set(scores) == {0.0, 1.0}
        listed = await client.list_environments()
        assert (listed.open_sessions, listed.session_capacity) == (1000, 1000)
        await refused(client.open_session(opening()), grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.SESSIONS_EXHAUSTED)


async def test_a_session_survives_its_connection(serve: Any, opening: Opening) -> None:
    async with serve() as client:
        opened = await client.open_session(opening())
        async with EnvironmentClient(client.target) as other:
            await other.step(opened.session_id, 0, "<answer>Left</answer>")
        assert (await client.step(opened.session_id, 1, "<answer>Left</answer>")).observation.startswith("P___")
