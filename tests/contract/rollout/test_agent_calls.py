"""The HTTP edge, driven with OpenAI's own client: what agents are answered and what is recorded of it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from rollwire.coordinator.intake import check_trajectory
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
