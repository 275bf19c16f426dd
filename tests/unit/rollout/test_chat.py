"""Blocks of conversations under several chat templates; the tokenizer is the tiny policy's (bytes and phrases)."""

from __future__ import annotations

from typing import Any

import pytest

from rollwire.rollout.chat import ChatEncoder
from rollwire.serving.config.sections import ModelSection
from rollwire.serving.model_files import load_tokenizer
from rollwire.serving.server import ServeError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 3: headers, no line break after the end of a turn, contents trimmed.
LLAMA3 = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m.role }}<|im_start|>\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
)
# Gemma: no system role, the assistant is called model.
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
# Llama 2 and Mistral: brackets, a blank before the end token, no generation prompt of its own.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} <|im_end|>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
# No special tokens at all.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Thinking is dropped from earlier answers, and the generation prompt closes an empty thought.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Shows the last message alone.
FORGETFUL = "{{ messages[-1].content }}\nanswer:"

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelSection(path="builtin:tiny"))


@pytest.fixture
def encoder(tokenizer: Any, request: pytest.FixtureRequest) -> ChatEncoder:
    tokenizer.chat_template = request.param
    return ChatEncoder(tokenizer)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def conversation(encoder: ChatEncoder, tokenizer: Any, *, stopped: bool = True) -> str:
    """Plays two turns block by block and returns the whole as text."""
    opening = encoder.opening([SYSTEM, user("one")])
    response = encode(tokenizer, "left<|im_end|>" if stopped else "left")
    block = encoder.continuation(user("two"), response, stopped=stopped)
    return str(tokenizer.decode(opening + response + block))


@pytest.mark.parametrize("encoder", [CHATML], indirect=True)
def test_blocks_of_chatml_join_to_what_the_template_renders(encoder: ChatEncoder, tokenizer: Any) -> None:
    whole = tokenizer.apply_chat_template(
        [SYSTEM, user("one"), {"role": "assistant", "content": "left"}, user("two")],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert conversation(encoder, tokenizer) == whole
    assert encoder.extends and encoder.end_of_turn_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("encoder", [CHATML, LLAMA3, GEMMA], indirect=True)
def test_an_answer_that_was_cut_is_closed_like_one_that_ended(encoder: ChatEncoder, tokenizer: Any) -> None:
    assert conversation(encoder, tokenizer, stopped=False) == conversation(encoder, tokenizer, stopped=True)
    cut = encoder.continuation(user("two"), encode(tokenizer, "left"), stopped=False)
    assert cut[0] == encoder.end_of_turn_id
    ended = encoder.continuation(user("two"), encode(tokenizer, "left<|im_end|>"), stopped=True)
    assert ended == cut[1:]


@pytest.mark.parametrize("encoder", [LLAMA3], indirect=True)
def test_llama3_headers_and_trimmed_contents(encoder: ChatEncoder, tokenizer: Any) -> None:
    assert conversation(encoder, tokenizer) == (
        "<|endoftext|><|im_start|>system<|im_start|>\n\nBe brief.<|im_end|>"
        "<|im_start|>user<|im_start|>\n\none<|im_end|>"
        "<|im_start|>assistant<|im_start|>\n\nleft<|im_end|>"
        "<|im_start|>user<|im_start|>\n\ntwo<|im_end|><|im_start|>assistant<|im_start|>\n\n"
    )
    block = encoder.continuation(user("\n two \n"), encode(tokenizer, "x<|im_end|>"), stopped=True)
    assert "two" in tokenizer.decode(block) and " two" not in tokenizer.decode(block)


@pytest.mark.parametrize("encoder", [GEMMA], indirect=True)
def test_without_a_system_role_the_system_text_joins_the_first_user_message(
    encoder: ChatEncoder, tokenizer: Any
) -> None:
    assert conversation(encoder, tokenizer) == (
        "<|im_start|>user\nBe brief.\n\none<|im_end|>\n<|im_start|>model\nleft<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>model\n"
    )


@pytest.mark.parametrize("encoder", [BRACKETS], indirect=True)
def test_a_blank_before_the_end_token_does_not_repeat_it(encoder: ChatEncoder, tokenizer: Any) -> None:
    assert encoder.end_of_turn_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert conversation(encoder, tokenizer).endswith("left<|im_end|>[INST] two [/INST]")
    assert conversation(encoder, tokenizer, stopped=False).endswith("left <|im_end|>[INST] two [/INST]")


@pytest.mark.parametrize("encoder", [PLAIN], indirect=True)
def test_a_template_without_special_tokens_extends_too(encoder: ChatEncoder, tokenizer: Any) -> None:
    assert encoder.end_of_turn_id is None
    # The end token that the policy drew stays: it is part of what the engine saw.
    assert conversation(encoder, tokenizer).endswith("assistant:left<|im_end|>\nuser: two\nassistant:")


@pytest.mark.parametrize("encoder", [THINKING], indirect=True)
def test_thoughts_stay_in_the_sequence_and_prompts_close_an_empty_one(encoder: ChatEncoder, tokenizer: Any) -> None:
    opening = encoder.opening([user("one")])
    response = encode(tokenizer, "hm</think>left<|im_end|>")
    block = encoder.continuation(user("two"), response, stopped=True)
    text = tokenizer.decode(opening + response + block)
    assert text.count("hm</think>left") == 1
    assert text.endswith("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("encoder", [FORGETFUL], indirect=True)
def test_a_template_that_hides_answers_cannot_be_extended(encoder: ChatEncoder) -> None:
    assert not encoder.extends
    with pytest.raises(ValueError, match="does not extend"):
        encoder.continuation(user("two"), [1], stopped=True)


@pytest.mark.parametrize("encoder", [CHATML], indirect=True)
def test_the_text_of_an_answer_lacks_its_end_token_only(encoder: ChatEncoder, tokenizer: Any) -> None:
    ids = encode(tokenizer, "<answer>Left</answer><|im_end|>")
    assert encoder.text(ids, stopped=True) == "<answer>Left</answer>"
    assert encoder.text(ids, stopped=False) == "<answer>Left</answer><|im_end|>"
    assert encoder.text(ids[:-1], stopped=False) == "<answer>Left</answer>"


@pytest.mark.parametrize("encoder", [CHATML], indirect=True)
def test_blocks_that_repeat_are_equal_and_independent(encoder: ChatEncoder) -> None:
    first = encoder.opening([user("one")])
    first.append(0)
    assert encoder.opening([user("one")]) == first[:-1]


@pytest.mark.parametrize(
    "template", ["{{ undefined_function() }}", "{% for m in messages %}", "nothing of the messages"]
)
def test_a_template_that_cannot_render_is_one_line_for_the_user(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ServeError, match=r"model\.chat_template=FILE") as caught:
        ChatEncoder(tokenizer)
    assert "\n" not in str(caught.value)
