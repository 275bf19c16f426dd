"""Text completions over the edge: prompts as text or token ids, and which of them extend an earlier call."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from scripted_edge import scripted_edge


async def complete(client: openai.AsyncOpenAI, prompt: Any, **settings: Any) -> Any:
    return await client.completions.create(model="policy", prompt=prompt, **settings)


async def test_token_ids_that_extend_an_earlier_call_continue_its_sequence() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("left<|im_end|>", "up<|im_end|>", "down<|im_end|>")
        start = bench.encode("one")
        first = await complete(client, start)
        assert first.choices[0].text == "left" and first.choices[0].finish_reason == "stop"
        left = [*start, *bench.encode("left<|im_end|>")]
        await complete(client, [[*left, *bench.encode("two")]])
        await complete(client, left[:-2])
        record = bench.close(call_rewards={first.id: 1.0}).trajectory
        assert [bench.text(sequence.token_ids) for sequence in record.sequences] == [
            "oneleft<|im_end|>twoup<|im_end|>",
            "onelefdown<|im_end|>",
        ]
        assert [turn.reward for turn in record.turns] == [1.0, 0.0, 0.0]


async def test_a_text_that_repeats_all_that_was_drawn_keeps_its_tokens() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        odd = [bench.encode(letter)[0] for letter in "Left"] + [bench.end_token]
        bench.engine.says = lambda request: odd
        await complete(client, "one ")
        await complete(client, "one Left<|im_end|> two ")
        # Without the end token it is another text, and becomes the tokens that it has.
        await complete(client, "one Left two ")
        requests = [list(request.token_ids) for request in bench.engine.requests]
        assert requests[1] == [*requests[0], *odd, *bench.encode(" two ")]
        assert requests[2] == bench.encode("one Left two ")
        assert [turn.sequence for turn in bench.close().trajectory.turns] == [0, 0, 1]


async def test_a_stop_text_belongs_to_what_was_drawn() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("think\nObs: wall", "up<|im_end|>")
        first = await complete(client, "one ", stop="\nObs:")
        assert first.choices[0].text == "think"
        await complete(client, "one think\nObs: free ")
        assert len(bench.close().trajectory.sequences) == 1


async def test_streams_and_log_probabilities() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("left<|im_end|>", "left<|im_end|>")
        whole = await complete(client, "one", logprobs=1)
        stream = await complete(client, "one", logprobs=0, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text == "left"
        tokens = [
            token for c in chunks if c.choices and c.choices[0].logprobs for token in c.choices[0].logprobs.tokens
        ]
        found = whole.choices[0].logprobs
        assert tokens == found.tokens == ["l", "e", "f", "t", "<|im_end|>"]
        assert found.token_logprobs == [-0.5] * 5 and found.text_offset == [0, 1, 2, 3, 4]
        assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"prompt": ""}, "invalid_value"),
        ({"prompt": []}, "invalid_value"),
        ({"prompt": ["one", "two"]}, "invalid_value"),
        ({"prompt": [-1]}, "invalid_value"),
        ({"prompt": [100_000]}, "invalid_value"),
        ({"prompt": [True]}, "invalid_value"),
        ({"prompt": 5}, "invalid_value"),
        ({"prompt": [5] * 1024}, "context_length_exceeded"),
        ({"prompt": "x" * 1024}, "context_length_exceeded"),
        ({"prompt": "one", "logprobs": 5}, "invalid_value"),
        ({"prompt": "one", "echo": True}, "unsupported_value"),
        ({"prompt": "one", "best_of": 3}, "unsupported_value"),
        ({"prompt": "one", "suffix": "end"}, "unsupported_value"),
        ({"prompt": "one", "extra_body": {"min_p": 0.1}}, "unsupported_parameter"),
    ],
)
async def test_a_parameter_outside_its_range_is_refused(settings: Any, code: str) -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        prompt = settings.pop("prompt")
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(client, prompt, **settings)
        assert caught.value.code == code and not bench.engine.requests
