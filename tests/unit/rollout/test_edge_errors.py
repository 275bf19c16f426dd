"""What the edge refuses, what it answers when something breaks, and that a session goes on after that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from scripted_edge import activate, scripted_edge

from rollwire.rollout.agents import drawing, edge, session
from rollwire.rollout.engine import GenerationError
from rollwire.rollout.policy import Hold
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import rollout_pb2, trajectory_pb2

ONE: Any = [{"role": "user", "content": "one"}]
TOOL = {"type": "function", "function": {"name": "f"}}
LIMIT_S = 30


async def ask(client: openai.AsyncOpenAI, messages: Any = ONE, **settings: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **settings)


def code_of(error: openai.APIStatusError) -> tuple[int, Any]:
    assert isinstance(error.body, dict) and error.body["message"] and "\n" not in error.body["message"]
    return error.status_code, error.body["code"]


async def refused(call: Any) -> tuple[int, Any]:
    """Returns status and code of a call that is answered with an error."""
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return code_of(caught.value)


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"n": 2}, "unsupported_value"),
        ({"temperature": 0.7}, "unsupported_value"),
        ({"extra_body": {"temperature": 10**400}}, "unsupported_value"),
        ({"top_p": 0.9}, "unsupported_value"),
        ({"extra_body": {"top_k": 5}}, "unsupported_value"),
        ({"extra_body": {"top_k": "many"}}, "unsupported_value"),
        ({"max_tokens": 257}, "invalid_value"),
        ({"max_completion_tokens": 0}, "invalid_value"),
        ({"extra_body": {"max_tokens": True}}, "invalid_value"),
        ({"stop": ["x"] * 17}, "invalid_value"),
        ({"stop": ""}, "invalid_value"),
        ({"extra_body": {"stop": 5}}, "invalid_value"),
        ({"seed": 1 << 63}, "invalid_value"),
        ({"logprobs": True, "top_logprobs": 2}, "unsupported_value"),
        ({"frequency_penalty": 0.5}, "unsupported_value"),
        ({"logit_bias": {"5": 10}}, "unsupported_value"),
        ({"response_format": {"type": "json_object"}}, "unsupported_value"),
        ({"tools": [TOOL], "tool_choice": "required"}, "unsupported_value"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "invalid_value"),
        ({"stream": True, "stream_options": {"pace": 1}}, "invalid_value"),
        ({"extra_body": {"stream": "yes"}}, "invalid_value"),
        ({"extra_body": {"guided_json": {}}}, "unsupported_parameter"),
        ({"messages": []}, "invalid_value"),
        ({"messages": ["text"]}, "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "unsupported_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "invalid_value",
        ),
        (
            {"messages": [*ONE, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "invalid_value",
        ),
        (
            {
                "messages": [
                    *ONE,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}]},
                ]
            },
            "invalid_value",
        ),
        ({"messages": [{"role": "user", "content": "word " * 500}]}, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 3_000_000}]}, "context_length_exceeded"),
    ],
)
async def test_a_parameter_outside_its_range_is_refused_and_counts_as_no_call(settings: Any, code: str) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        status, found = await refused(ask(client, **{"messages": ONE, **settings}))
        assert (status, found) == (400, code)
        assert not bench.engine.requests and bench.close().calls == 0


async def test_parameters_with_the_sessions_or_without_effect_are_taken() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        await ask(
            client,
            temperature=1.0,
            top_p=1.0,
            n=1,
            frequency_penalty=0,
            presence_penalty=0,
            logit_bias={},
            user="me",
            metadata={"a": "b"},
            store=False,
            tool_choice="auto",
            parallel_tool_calls=True,
            response_format={"type": "text"},
            extra_body={"top_k": -1},
        )
        assert bench.close().calls == 1


async def test_functions_need_a_template_that_shows_them() -> None:
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    async with scripted_edge(template=template) as bench:
        client = await bench.open()
        assert await refused(ask(client, tools=[TOOL])) == (400, "tools_not_rendered")


async def test_a_conversation_that_the_template_refuses() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' and loop.index0 % 2 and messages[0].role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    async with scripted_edge(template=template) as bench:
        client = await bench.open()
        with pytest.raises(openai.BadRequestError, match="roles must alternate") as caught:
            await ask(client, [*ONE, *ONE])
        assert code_of(caught.value) == (400, "template_error")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"model": "policy", "messages": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": "policy", "tools": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": "policy", "temperature": NaN}',
        b'{"model": "policy", "temperature": 1e999}',
    ],
)
async def test_a_body_that_is_no_json_object(body: bytes) -> None:
    async with scripted_edge() as bench, httpx.AsyncClient() as raw:
        await bench.open()
        url, headers = f"{bench.http.base_url}/chat/completions", {"authorization": "Bearer key-s1"}
        answer = await raw.post(url, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_keys_models_paths_and_methods() -> None:
    async with scripted_edge() as bench, httpx.AsyncClient() as raw:
        client = await bench.open()
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).owned_by == "rollwire"
        assert await refused(client.models.retrieve("gpt")) == (404, "model_not_found")
        assert await refused(client.chat.completions.create(model="gpt", messages=ONE)) == (404, "model_not_found")
        assert await refused(ask(client.with_options(api_key="wrong"))) == (401, "invalid_api_key")
        assert await refused(client.with_options(api_key="wrong").models.list()) == (401, "invalid_api_key")
        for headers in ({}, {"authorization": "Basic key-s1"}, {"authorization": "Bearer k\xff"}):
            answer = await raw.get(f"{bench.http.base_url}/models", headers=httpx.Headers(headers, encoding="latin-1"))
            assert answer.status_code == 401 and answer.headers["x-should-retry"] == "false"
        for path, method, status in (("/embeddings", "POST", 404), ("/chat/completions", "GET", 405)):
            answer = await raw.request(method, f"{bench.http.base_url}{path}")
            assert answer.status_code == status and "/v1/chat/completions" in answer.json()["error"]["message"]
        bench.close()
        assert await refused(ask(client)) == (401, "invalid_api_key")


async def test_a_request_that_is_too_large_or_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_edge(max_request_mib=1) as bench, httpx.AsyncClient() as raw:
        client = await bench.open()
        large = [{"role": "user", "content": "x" * (1 << 20)}]
        assert await refused(ask(client, large)) == (413, "request_too_large")
        url, headers = f"{bench.http.base_url}/chat/completions", {"authorization": "Bearer key-s1"}

        async def chunks(pause: bool) -> Any:
            for _ in range(40):
                yield b"x" * (1 << 15)
            if pause:
                await asyncio.Event().wait()

        answer = await raw.post(url, content=chunks(False), headers=headers)
        assert answer.status_code == 413
        monkeypatch.setattr(edge, "BODY_TIMEOUT_S", 0.2)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(bench.http.base_url.split(":")[2].split("/")[0])
        )
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-s1\r\nContent-Length: 9\r\n\r\n{"
        )
        async with asyncio.timeout(LIMIT_S):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_an_engine_that_fails_is_502_and_the_next_call_is_answered() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        for failure in (GenerationError("out of memory"), RuntimeError("a bug with /a/path")):
            bench.engine.failure = failure
            with pytest.raises(openai.InternalServerError) as caught:
                await ask(client)
            expected = (502, "engine_error") if isinstance(failure, GenerationError) else (500, "internal")
            assert code_of(caught.value) == expected and "/a/path" not in str(caught.value)
        bench.engine.failure = None
        await ask(client)
        assert bench.close().calls == 1


async def test_an_engine_that_fails_within_a_stream_ends_it_with_an_error() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.engine.says = lambda request: bench.encode("x")[:1] * 3
        original = bench.engine.generate

        async def failing(request: Any) -> Any:
            async for piece in original(request):
                yield piece
                raise GenerationError("it broke")

        bench.engine.generate = failing  # type: ignore[method-assign]
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in await ask(client, stream=True):
                pass
        assert bench.close().calls == 0


async def test_without_weights_or_while_draining_it_is_503() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.policy.states.discard()
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
        assert code_of(caught.value) == (503, "no_weights") and caught.value.response.headers["retry-after"] == "1"
        activate(bench.policy, 1)
        await ask(client)
        bench.http.drain()
        assert await refused(ask(client)) == (503, "draining")


async def test_more_calls_than_the_server_or_a_session_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_RUNNING_CALLS", 1)
    async with scripted_edge(max_concurrent_calls=2) as bench:
        client, other = await bench.open("s1"), await bench.open("s2")
        bench.engine.permits = asyncio.Semaphore(0)
        first = asyncio.create_task(ask(client))
        await until(lambda: bench.engine.requests)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
        assert "of this session" in str(caught.value) and caught.value.response.headers["retry-after"] == "1"
        second = asyncio.create_task(ask(other))
        await until(lambda: len(bench.engine.requests) == 2)
        with pytest.raises(openai.RateLimitError, match="on this server") as caught:
            await ask(other)
        assert code_of(caught.value) == (429, "too_many_calls")
        bench.engine.permits.release()
        bench.engine.permits.release()
        await asyncio.gather(first, second)


async def test_a_session_ends_its_calls_by_number_by_time_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_edge() as bench:
        client = await bench.open(max_calls=1)
        await ask(client)
        assert await refused(ask(client)) == (409, "calls_exhausted")
        client = await bench.open("s2")
        bench.sessions.find("key-s2").end_s = 0.0  # type: ignore[union-attr]
        assert await refused(ask(client)) == (409, "session_timeout")
        client = await bench.open("s3")
        monkeypatch.setattr(session, "INTERNAL_MESSAGE_BYTES", 100_000)
        codes = {await refused_or_answered(client) for _ in range(50)}
        assert codes == {None, (409, "record_full")}
        assert bench.close("s3").ByteSize() < 100_000


async def refused_or_answered(client: openai.AsyncOpenAI) -> Any:
    try:
        await client.completions.create(model="policy", prompt=[5] * 500)
    except openai.APIStatusError as error:
        return code_of(error)
    return None


async def test_a_policy_that_does_not_answer_is_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "GENERATION_TIMEOUT_S", 0.2)
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.policy.close_gate(Hold.PAUSE)
        assert await refused(ask(client)) == (504, "generation_timeout")
        bench.policy.open_gate(Hold.PAUSE)
        await ask(client)
        assert bench.close().calls == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_goes_away_aborts_its_call(stream: bool) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.engine.permits = asyncio.Semaphore(0)
        call = asyncio.create_task(ask(client, stream=stream))
        await until(bench.engine.waiting.is_set)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: bench.engine.aborted == 1)
        bench.engine.permits = None
        await ask(client)
        closed = bench.close()
        assert closed.calls == 1 and len(closed.trajectory.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_session_aborts_its_calls(stream: bool) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        done = await ask(client)
        bench.engine.permits = asyncio.Semaphore(0)
        call = asyncio.create_task(ask(client, stream=stream))
        await until(bench.engine.waiting.is_set)
        closed = bench.close(reward=1.0, call_rewards={done.id: 0.5})
        assert await refused(call) == (409, "session_closed")
        assert closed.calls == 1 and closed.trajectory.score == 1.5
        await until(lambda: bench.engine.aborted == 1)
        assert bench.slots.taken == 0


async def test_a_pause_holds_calls_and_an_aborted_answer_is_drawn_again() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("left<|im_end|>", "right<|im_end|>")
        bench.engine.permits = asyncio.Semaphore(2)
        call = asyncio.create_task(ask(client))
        await until(lambda: bench.engine.permits is not None and bench.engine.permits.locked())
        bench.policy.close_gate(Hold.UPDATE)
        assert await bench.policy.make_way(Hold.UPDATE, rollout_pb2.PAUSE_MODE_ABORT, 0.0) == 1
        bench.engine.permits = None
        activate(bench.policy, 1)
        assert not call.done()
        bench.policy.open_gate(Hold.UPDATE)
        answer = await call
        assert answer.choices[0].message.content == "right" and answer.system_fingerprint == "main@1"
        assert [request.seed for request in bench.engine.requests] == [bench.engine.requests[0].seed] * 2
        record = bench.close().trajectory
        assert [span.version.step for span in record.sequences[0].version_spans] == [1]


async def test_a_stream_that_was_cut_goes_on_under_the_new_weights() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("abcdef<|im_end|>", "xyz<|im_end|>")
        bench.engine.permits = asyncio.Semaphore(2)
        stream = await ask(client, stream=True)
        text = ""
        async with asyncio.timeout(LIMIT_S):
            while text != "ab":
                text += (await anext(stream)).choices[0].delta.content or ""
        bench.policy.close_gate(Hold.UPDATE)
        assert await bench.policy.make_way(Hold.UPDATE, rollout_pb2.PAUSE_MODE_ABORT, 0.0) == 1
        bench.engine.permits = None
        activate(bench.policy, 1)
        bench.policy.open_gate(Hold.UPDATE)
        text += "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "abxyz"
        first, second = bench.engine.requests
        assert list(second.token_ids) == [*first.token_ids, *bench.encode("ab")] and second.seed != first.seed
        record = bench.close().trajectory
        spans = [(span.range.end - span.range.begin, span.version.step) for span in record.sequences[0].version_spans]
        assert spans == [(2, 0), (4, 1)]
        assert record.turns[0].stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN


async def test_seeds_follow_from_session_call_and_wish() -> None:
    async with scripted_edge() as bench:
        first, second = await bench.open("s1"), await bench.open("s2")
        for client in (first, second):
            await ask(client)
            await ask(client, seed=7)
            await ask(client, seed=8)
        seeds = [request.seed for request in bench.engine.requests]
        assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3


async def test_closing_checks_rewards_and_the_session_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        answer = await ask(client)
        for wrong in (
            {"reward": float("nan")},
            {"call_rewards": {answer.id: float("inf")}},
            {"call_rewards": {"chatcmpl-s1-9": 1.0}},
            {"metrics": {"a b": 1.0}},
            {"metrics": {"a": float("nan")}},
            {"metrics": {f"m{number}": 1.0 for number in range(257)}},
        ):
            with pytest.raises(RollwireError, match="INVALID_FIELD"):
                bench.close(**wrong)
        record = bench.close(metrics={"won": 1.0}, truncated=True).trajectory
        assert dict(record.metrics) == {"won": 1.0} and record.end == trajectory_pb2.EPISODE_END_TRUNCATED
        assert record.turns[0].truncated and not record.turns[0].terminated


async def test_records_that_are_thrown_away_or_empty() -> None:
    async with scripted_edge() as bench:
        client = await bench.open("s1")
        await ask(client)
        assert bench.close("s1", discard=True, reward=float("nan")) == rollout_pb2.ClosePolicySessionResponse(calls=1)
        await bench.open("s2")
        assert bench.close("s2") == rollout_pb2.ClosePolicySessionResponse()


def test_error_bodies_are_openais() -> None:
    from rollwire.rollout.agents.errors import bad_request

    body = json.loads(json.dumps(bad_request("n", "x" * 1000, "1").body()))
    assert set(body["error"]) == {"message", "type", "param", "code"} and len(body["error"]["message"]) < 200
