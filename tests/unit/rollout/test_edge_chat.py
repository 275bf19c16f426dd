"""Conversations over the edge: which tokens are kept, which calls share a sequence, what is seen and recorded."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from scripted_edge import EdgeBench, scripted_edge

from rollwire.v1 import trajectory_pb2

SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **settings)


async def streamed(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> tuple[str, list[Any]]:
    """Returns the text of a streamed answer and its chunks."""
    stream = await ask(client, messages, stream=True, **settings)
    chunks = [chunk async for chunk in stream]
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


async def test_what_was_answered_is_never_tokenised_again() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        # The tokenizer would write this differently: one token per letter, instead of one for the word.
        odd = [bench.encode(letter)[0] for letter in "Left"] + [bench.end_token]
        assert odd[:-1] != bench.encode("Left")
        bench.engine.says = lambda request: odd
        messages: list[Any] = [SYSTEM, user("one")]
        first = await ask(client, messages)
        assert first.choices[0].message.content == "Left" and first.choices[0].finish_reason == "stop"
        messages += [first.choices[0].message.model_dump(), user("two")]
        await ask(client, messages)
        prompt = bench.engine.requests[1].token_ids
        assert list(prompt)[: first.usage.prompt_tokens + 5] == [*bench.engine.requests[0].token_ids, *odd]
        rendered = bench.tokenizer.apply_chat_template(
            [SYSTEM, user("one"), {"role": "assistant", "content": "Left"}, user("two")],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert bench.text(prompt) == rendered
        record = bench.close().trajectory
        assert len(record.sequences) == 1
        assert list(record.sequences[0].token_ids) == [*prompt, *odd]
        sampled = [t for t, m in zip(record.sequences[0].token_ids, record.sequences[0].loss_mask, strict=True) if m]
        assert sampled == odd + odd


async def test_a_retry_and_a_branch_start_new_samples_and_train_no_token_twice() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("left<|im_end|>", "right<|im_end|>", "up<|im_end|>", "down<|im_end|>")
        start: list[Any] = [user("one")]
        left = await ask(client, start)
        right = await ask(client, start)
        went = [*start, left.choices[0].message, user("two")]
        up, down = await ask(client, went), await ask(client, went)
        rewards = {left.id: 1.0, right.id: 2.0, up.id: 4.0, down.id: 8.0}
        record = bench.close(reward=16.0, call_rewards=rewards).trajectory
        texts = [bench.text(sequence.token_ids) for sequence in record.sequences]
        prompt = "<|im_start|>assistant\n"
        assert [text.split(prompt, 1)[1] for text in texts] == [
            f"left<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n{prompt}up<|im_end|>",
            "right<|im_end|>",
            f"left<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n{prompt}down<|im_end|>",
        ]
        assert [(turn.sequence, turn.reward) for turn in record.turns] == [(0, 1.0), (0, 4.0), (1, 2.0), (2, 24.0)]
        assert [turn.terminated for turn in record.turns] == [False, False, False, True]
        sampled = [
            bench.text([t for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m]) for s in record.sequences
        ]
        assert sampled == ["left<|im_end|>up<|im_end|>", "right<|im_end|>", "down<|im_end|>"]
        assert record.turns[3].prompt.begin == 0
        keys = [request.cache_key for request in bench.engine.requests]
        assert keys[0] == keys[2] and len(set(keys)) == 3
        assert set(bench.engine.released) == set(keys)


@pytest.mark.parametrize(
    "edited",
    [
        [user("one!"), {"role": "assistant", "content": "left"}, user("two")],
        [user("one"), {"role": "assistant", "content": "left "}, user("two")],
        [SYSTEM, user("one"), {"role": "assistant", "content": "left"}, user("two")],
    ],
)
async def test_an_edited_history_starts_a_new_sample(edited: list[Any]) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("left<|im_end|>", "up<|im_end|>")
        await ask(client, [user("one")])
        await ask(client, edited)
        assert len(bench.close().trajectory.sequences) == 2


async def test_contents_in_parts_and_clients_own_objects_are_the_same_messages() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("left<|im_end|>", "up<|im_end|>")
        first = await ask(client, [{"role": "developer", "content": "Be brief."}, user("one")])
        parts: Any = [{"type": "text", "text": "one"}]
        await ask(
            client,
            [SYSTEM, {"role": "user", "content": parts}, first.choices[0].message, {**user("two"), "name": "Ann"}],
        )
        assert len(bench.close().trajectory.sequences) == 1


async def test_a_stream_says_what_a_whole_answer_says() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        said = "Gr\u00fc\u00dfe \U0001f600, left<|im_end|>"
        bench.says(said, said, said)
        whole = await ask(client, [user("one")], logprobs=True)
        text, chunks = await streamed(client, [user("one")], logprobs=True, stream_options={"include_usage": True})
        assert text == whole.choices[0].message.content == said.removesuffix("<|im_end|>")
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(bench.encode(said))
        logprobs = [
            entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content
        ]
        assert logprobs == whole.choices[0].logprobs.content and len(logprobs) == len(bench.encode(said))
        assert all(entry.logprob == -0.5 for entry in logprobs) and logprobs[-1].token == "<|im_end|>"
        messages = [user("one"), {"role": "assistant", "content": text}, user("two")]
        await streamed(client, messages)
        assert sorted({turn.sequence for turn in bench.close().trajectory.turns}) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_an_answer_with_the_token_that_completes_it(stream: bool) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("go left\nObservation: wall and more<|im_end|>", "up<|im_end|>")
        messages: list[Any] = [user("one")]
        if stream:
            text, chunks = await streamed(client, messages, stop=["wall", "\nObs"])
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            answer = await ask(client, messages, stop=["wall", "\nObs"])
            text = answer.choices[0].message.content
        assert text == "go left"
        assert bench.engine.aborted == 1
        await ask(client, [*messages, {"role": "assistant", "content": text}, user("two")])
        record = bench.close().trajectory
        drawn = record.turns[0].response
        recorded = bench.text(record.sequences[0].token_ids[drawn.begin : drawn.end])
        assert len(record.sequences) == 1 and recorded.startswith("go left\nObs") and "wall" not in recorded
        assert record.turns[0].stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN
        # The conversation goes on behind what was drawn, with the end that the template writes.
        assert f"{recorded}<|im_end|>\n<|im_start|>user\ntwo" in bench.text(record.sequences[0].token_ids)


async def test_limits_end_an_answer_with_length() -> None:
    async with scripted_edge(max_sequence_tokens=40) as bench:
        client = await bench.open()
        bench.says("a b c d e f g", "a b c d e f g h i j k l m n o p q r s t u v w x y z")
        cut = await ask(client, [user("one")], max_completion_tokens=3)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3
        filled = await ask(client, [user("one")])
        assert filled.choices[0].finish_reason == "length" and filled.usage.total_tokens == 40
        reasons = [turn.stop_reason for turn in bench.close().trajectory.turns]
        assert reasons == [trajectory_pb2.STOP_REASON_MAX_TOKENS, trajectory_pb2.STOP_REASON_LENGTH_LIMIT]


async def converse_with_tools(bench: EdgeBench, client: openai.AsyncOpenAI, stream: bool) -> Any:
    """Lets the policy call a function and answers it; returns the message with the call."""
    messages: list[Any] = [user("Weather?")]
    if stream:
        text, chunks = await streamed(client, messages, tools=[WEATHER])
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        message: Any = {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": c.id, "type": "function", "function": c.function.model_dump()} for c in calls],
        }
        found = calls
    else:
        answer = await ask(client, messages, tools=[WEATHER])
        assert answer.choices[0].finish_reason == "tool_calls"
        message, found = answer.choices[0].message, answer.choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
        ("weather", {"city": "Köln"})
    ]
    result = {"role": "tool", "tool_call_id": found[0].id, "content": "rain"}
    last = await ask(client, [*messages, message, result], tools=[WEATHER])
    assert last.choices[0].message.content == "It rains." and last.choices[0].message.tool_calls is None
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["", "I look. "])
async def test_functions_are_called_and_answered_in_one_sequence(stream: bool, before: str) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says(f"{before}{CALL}<|im_end|>", "It rains.<|im_end|>")
        await converse_with_tools(bench, client, stream)
        record = bench.close().trajectory
        text = bench.text(record.sequences[0].token_ids)
        assert len(record.sequences) == 1 and '"name": "weather"' in text.split("Weather?")[0]
        assert text.endswith(
            f"{before}{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>rain</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nIt rains.<|im_end|>"
        )


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>{no json}</tool_call>",
        '<tool_call>{"arguments": {}}',
        "<tool_ca",
        '<tool_call>{"name": "weather", "arguments": {"at": "\\ud800"}}</tool_call>',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_function_call_is_text(said: str, stream: bool) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says(f"{said}<|im_end|>")
        if stream:
            text, chunks = await streamed(client, [user("one")], tools=[WEATHER])
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            answer = await ask(client, [user("one")], tools=[WEATHER])
            text = answer.choices[0].message.content
        assert text == said


async def test_without_a_choice_of_functions_calls_are_text_and_the_prompt_stays() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says(f"{CALL}<|im_end|>", f"{CALL}<|im_end|>")
        called = await ask(client, [user("one")], tools=[WEATHER])
        text = await ask(client, [user("one")], tools=[WEATHER], tool_choice="none")
        assert called.choices[0].message.tool_calls and text.choices[0].message.content == CALL
        assert bench.engine.requests[0].token_ids == bench.engine.requests[1].token_ids


async def test_a_template_that_cannot_continue_starts_a_new_sample_each_time() -> None:
    async with scripted_edge(template="{{ messages[-1].content }}<|im_end|>\nanswer:") as bench:
        client = await bench.open()
        bench.says("left<|im_end|>", "up<|im_end|>")
        first = await ask(client, [user("one")])
        await ask(client, [user("one"), first.choices[0].message, user("two")])
        texts = [bench.text(s.token_ids) for s in bench.close().trajectory.sequences]
        assert texts == ["one<|im_end|>\nanswer:left<|im_end|>", "two<|im_end|>\nanswer:up<|im_end|>"]
