"""The HTTP edge, driven with OpenAI's own client: what agents are answered and what is recorded of it."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.coordinator.intake import check_trajectory
from rollwire.rollout.seeds import derive_seed
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.server import ServeError
from rollwire.v1 import rollout_pb2, trajectory_pb2

HTTP = {"address": "127.0.0.1:0"}
FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def opening(session_id: str = "s1", **changes: Any) -> rollout_pb2.OpenPolicySessionRequest:
    settings: dict[str, Any] = {
        "fence": FENCE,
        "session_id": session_id,
        "key_digest": hashlib.sha256(f"key-{session_id}".encode()).digest(),
        "sampling": trajectory_pb2.SamplingSettings(max_tokens=6),
        "sampling_seed": 5,
        "max_calls": 20,
        "group_id": "g1",
        "environment_tag": "Agent",
        "environment_seed": 11,
        "episode_index": 2,
        "attempt": 1,
    }
    return rollout_pb2.OpenPolicySessionRequest(**{**settings, **changes})


@asynccontextmanager
async def agent(bench: Any, session_id: str = "s1", **changes: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """Opens a session and yields OpenAI's client for it."""
    opened = await bench.client.open_policy_session(opening(session_id, **changes))
    assert opened.model == "policy"
    client = openai.AsyncOpenAI(base_url=opened.base_url, api_key=f"key-{session_id}", max_retries=0, timeout=30)
    async with client:
        yield client


async def close(bench: Any, session_id: str = "s1", **changes: Any) -> rollout_pb2.ClosePolicySessionResponse:
    request = rollout_pb2.ClosePolicySessionRequest(fence=FENCE, session_id=session_id, **changes)
    answer = await bench.client.close_policy_session(request)
    if answer.HasField("trajectory"):
        check_trajectory(answer.trajectory, "g1", 1, [2])
    return answer


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **settings)


async def test_a_conversation_becomes_one_sequence(serve: Any) -> None:
    async with serve(rollout={"http": HTTP}) as bench, agent(bench) as client:
        messages: list[Any] = [SYSTEM, user("one")]
        first = await ask(client, messages)
        messages += [first.choices[0].message, user("two")]
        second = await ask(client, messages)
        closed = await close(bench, reward=1.0, call_rewards={first.id: 0.25})
        record = closed.trajectory
        assert closed.calls == 2 and len(record.sequences) == 1
        assert [turn.reward for turn in record.turns] == [0.25, 1.0] and record.score == 1.25
        assert [turn.terminated for turn in record.turns] == [False, True]
        assert first.usage.completion_tokens == record.turns[0].response.end - record.turns[0].response.begin
        assert second.usage.prompt_tokens == record.turns[1].prompt.end
        info = await bench.client.get_info()
        assert (record.tokenizer_hash, record.template_hash) == (info.tokenizer_hash, info.template_hash)
        assert info.running_episodes == 0
        assert await close(bench, reward=7.0) == closed


async def test_a_call_is_drawn_as_generate_draws_it(serve: Any) -> None:
    """The same prompt, settings and seed give the same tokens and log-probabilities through either door."""
    async with serve(rollout={"http": HTTP}) as bench, agent(bench) as client:
        prompt = [5, 6, 7]
        answer = await client.completions.create(model="policy", prompt=prompt, logprobs=0)
        record = (await close(bench)).trajectory
        request = rollout_pb2.GenerateRequest(
            token_ids=prompt, sampling=trajectory_pb2.SamplingSettings(max_tokens=6), seed=derive_seed(5, 0)
        )
        pieces = [piece async for piece in bench.client.generate(request, timeout_s=20)]
        assert list(record.sequences[0].token_ids)[3:] == [token for piece in pieces for token in piece.token_ids]
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        assert list(record.sequences[0].logprobs)[3:] == logprobs
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(logprobs)
        assert record.sampling.stop_token_ids and record.sampling.temperature == 1.0


async def test_equal_seeds_give_equal_sessions(serve: Any) -> None:
    async with serve(rollout={"http": HTTP}, run={"deterministic": True}) as bench:
        records = []
        for session_id in ("s1", "s2"):
            async with agent(bench, session_id) as client:
                messages: list[Any] = [SYSTEM, user("one")]
                for _ in range(3):
                    answer = await ask(client, messages)
                    messages += [answer.choices[0].message, user("on")]
                records.append((await close(bench, session_id)).trajectory)
        assert list(records[0].sequences) == list(records[1].sequences)
        assert len(records[0].sequences) == 1 and len(records[0].turns) == 3


async def test_an_update_within_a_session_is_recorded_per_token_and_pauses_hold_calls(serve: Any) -> None:
    async with serve(rollout={"http": HTTP}) as bench, agent(bench) as client:
        messages: list[Any] = [user("one")]
        first = await ask(client, messages)
        await bench.update(1)
        await bench.client.pause(rollout_pb2.PauseRequest(fence=FENCE))
        messages += [first.choices[0].message, user("two")]
        call = asyncio.create_task(ask(client, messages))
        listed = await until_listed(bench, lambda session: session.calls == 1 and not session.idle.ToNanoseconds())
        assert [session.session_id for session in listed] == ["s1"] and not call.done()
        await bench.client.resume(rollout_pb2.ResumeRequest(fence=FENCE))
        second = await call
        assert (first.system_fingerprint, second.system_fingerprint) == ("lineage-test@0", "lineage-test@1")
        record = (await close(bench)).trajectory
        turns = [(turn.response.begin, turn.response.end) for turn in record.turns]
        spans = [(span.range.begin, span.range.end, span.version.step) for span in record.sequences[0].version_spans]
        assert spans == [(*turns[0], 0), (*turns[1], 1)]
        # Nothing of the first version's keys and values was used: the raw policy says the same.
        request = rollout_pb2.GenerateRequest(
            token_ids=record.sequences[0].token_ids[: turns[1][0]],
            sampling=trajectory_pb2.SamplingSettings(max_tokens=6),
            seed=derive_seed(5, 1),
        )
        pieces = [piece async for piece in bench.client.generate(request, timeout_s=20)]
        drawn = list(record.sequences[0].token_ids[turns[1][0] :])
        assert drawn == [token for piece in pieces for token in piece.token_ids]


async def until_listed(bench: Any, condition: Any) -> list[rollout_pb2.PolicySession]:
    """Waits until all open sessions of the run fulfil a condition."""
    request = rollout_pb2.ListPolicySessionsRequest(fence=FENCE)
    async with asyncio.timeout(30):
        while True:
            listed = list((await bench.client.list_policy_sessions(request)).sessions)
            if all(map(condition, listed)):
                return listed
            await asyncio.sleep(0.02)


async def test_an_agent_that_goes_away_frees_the_engine(serve: Any) -> None:
    sampling = trajectory_pb2.SamplingSettings(max_tokens=400, stop_token_ids=[0])
    async with serve(rollout={"http": HTTP}) as bench, agent(bench, sampling=sampling) as client:
        policy = bench.server._servicer.parts.policy
        stream = await ask(client, [user("one")], stream=True)
        await anext(stream)
        await stream.close()
        assert await policy.drain(30)
        await ask(client, [user("one")], max_tokens=2)
        assert (await close(bench)).calls >= 1


async def test_a_session_ends_when_no_call_came_within_its_lease(serve: Any) -> None:
    async with serve(rollout={"http": HTTP}) as bench, agent(bench, lease=Duration(seconds=1)) as client:
        await ask(client, [user("one")])
        assert not await until_listed(bench, lambda session: False)
        with pytest.raises(openai.AuthenticationError):
            await ask(client, [user("one")])
        with pytest.raises(RollwireError) as caught:
            await close(bench)
        assert caught.value.reason == Reason.UNKNOWN_SESSION
        assert (await bench.client.get_info()).running_episodes == 0


async def test_sessions_belong_to_a_run_and_its_current_coordinator(serve: Any) -> None:
    async with serve(rollout={"http": HTTP}) as bench:
        await bench.client.open_policy_session(opening())
        other = trajectory_pb2.Fence(run_id="other", epoch=1)
        request = rollout_pb2.ListPolicySessionsRequest(fence=other)
        assert not (await bench.client.list_policy_sessions(request)).sessions
        with pytest.raises(RollwireError) as caught:
            await bench.client.close_policy_session(rollout_pb2.ClosePolicySessionRequest(fence=other, session_id="s1"))
        assert caught.value.reason == Reason.UNKNOWN_SESSION
        newer = trajectory_pb2.Fence(run_id="run", epoch=2)
        listed = await bench.client.list_policy_sessions(rollout_pb2.ListPolicySessionsRequest(fence=newer))
        assert [session.session_id for session in listed.sessions] == ["s1"]
        with pytest.raises(RollwireError) as caught:
            await bench.client.open_policy_session(opening("s2"))
        assert caught.value.reason == Reason.FENCED


async def test_opening_is_idempotent_and_counts_as_an_episode(serve: Any) -> None:
    async with serve(rollout={"http": HTTP, "max_episodes": 2}) as bench:
        first = await bench.client.open_policy_session(opening())
        assert await bench.client.open_policy_session(opening()) == first
        assert (await bench.client.get_info()).running_episodes == 1
        await bench.client.open_policy_session(opening("s0"))
        refusals = {
            Reason.ALREADY_EXISTS: (opening(max_calls=3), opening("s3", key_digest=opening().key_digest)),
            Reason.EPISODES_EXHAUSTED: (opening("s2"),),
            Reason.WRONG_VERSION: (opening("s2", required_version=bench.version(9)),),
            Reason.INVALID_FIELD: (opening(""), opening("s2", key_digest=b"k"), opening("s2", max_calls=0)),
        }
        for reason, requests in refusals.items():
            for request in requests:
                with pytest.raises(RollwireError) as caught:
                    await bench.client.open_policy_session(request)
                assert caught.value.reason == reason
        with pytest.raises(RollwireError) as caught:
            await bench.play()
        assert caught.value.reason == Reason.EPISODES_EXHAUSTED
        await close(bench, discard=True)
        with pytest.raises(RollwireError) as caught:
            await bench.client.open_policy_session(opening())
        assert caught.value.reason == Reason.ALREADY_EXISTS
        await bench.client.open_policy_session(opening("s2", required_version=bench.version(0)))


async def test_a_server_without_an_edge_or_without_weights(serve: Any) -> None:
    async with serve() as bench:
        for call in (bench.client.open_policy_session(opening()), close(bench)):
            with pytest.raises(RollwireError) as caught:
                await call
            assert caught.value.reason == Reason.AGENTS_DISABLED
        request = rollout_pb2.ListPolicySessionsRequest(fence=FENCE)
        assert not (await bench.client.list_policy_sessions(request)).sessions
    async with serve(active=None, rollout={"http": HTTP}) as bench:
        with pytest.raises(RollwireError) as caught:
            await bench.client.open_policy_session(opening())
        assert caught.value.reason == Reason.NO_WEIGHTS


async def test_a_port_that_is_taken_and_a_public_url(serve: Any) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ServeError, match=r"rollout\.http\.address.*port 0"),
    ):
        async with serve(rollout={"http": {"address": f"127.0.0.1:{taken.getsockname()[1]}"}}):
            pass
    url = "https://policy.example.org/v1"
    async with serve(rollout={"http": {**HTTP, "public_url": f"{url}/"}}) as bench:
        assert (await bench.client.open_policy_session(opening())).base_url == url


async def test_a_server_that_stops_answers_its_calls_and_frees_its_port(serve: Any) -> None:
    async with AsyncExitStack() as outer:
        async with serve(rollout={"http": HTTP}) as bench:
            client = await outer.enter_async_context(agent(bench))
            await ask(client, [user("one")])
        with pytest.raises(openai.APIConnectionError):
            await ask(client, [user("one")])


async def test_settings_of_a_session_are_compared_as_numbers(serve: Any) -> None:
    sampling = trajectory_pb2.SamplingSettings(max_tokens=6, temperature=0.7, top_p=0.9, top_k=20)
    async with serve(rollout={"http": HTTP}) as bench, agent(bench, sampling=sampling) as client:
        await ask(client, [user("one")], temperature=0.7, top_p=0.9, extra_body={"top_k": 20})
        with pytest.raises(openai.BadRequestError, match=r"temperature is 0\.6"):
            await ask(client, [user("one")], temperature=0.6)


async def test_many_agents_at_once(serve: Any) -> None:
    async with serve(rollout={"http": HTTP}) as bench:

        async def play(number: int) -> rollout_pb2.ClosePolicySessionResponse:
            async with agent(bench, f"s{number}", sampling_seed=number) as client:
                messages: list[Any] = [SYSTEM, user(f"task {number}")]
                for turn in range(4):
                    answer = await ask(client, messages, stream=False)
                    messages += [answer.choices[0].message, user(f"turn {turn}")]
                return await close(bench, f"s{number}", reward=float(number))

        closed = await asyncio.gather(*(play(number) for number in range(12)))
        assert [(one.calls, len(one.trajectory.sequences), one.trajectory.score) for one in closed] == [
            (4, 1, float(number)) for number in range(12)
        ]
