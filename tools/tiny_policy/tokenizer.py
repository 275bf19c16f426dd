"""Builds the tokenizer of the tiny policy: bytes, plus one token per fixed phrase of ROLL's FrozenLake prompt.

Any text in Unicode's NFC form can be encoded and comes back unchanged, because every byte has a token. The phrases make
a turn about 35 tokens instead of about 350, which is what lets a CPU train on whole episodes.
"""

from __future__ import annotations

import json
import pathlib
import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rollwire.environment.frozen_lake import ACTIONS, INSTRUCTIONS
from rollwire.rollout.prompts import SYSTEM_TEMPLATE, TURN_TEMPLATE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Responses in a FrozenLake turn are capped at this many tokens, so the phrase around the number is fixed too.
USUAL_RESPONSE_TOKENS = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def turn_literals() -> list[str]:
    """Returns the fixed texts of the turn template, in order, without the fields between them."""
    return [literal for literal, *_ in string.Formatter().parse(TURN_TEMPLATE) if literal]


def phrases() -> list[str]:
    """Returns the texts that become one token each; the longest match at a position wins."""
    turn, before_observation, before_actions, before_limit, ending = turn_literals()
    return [
        f"system\n{SYSTEM_TEMPLATE}",
        f"user\n{INSTRUCTIONS}\n{turn}",
        f"user\n{turn}",
        "system\n",
        "user\n",
        "assistant\n",
        INSTRUCTIONS,
        before_observation,
        before_actions,
        before_limit,
        ending,
        f"{before_limit}{USUAL_RESPONSE_TOKENS}{ending}",
        *("<think>", "</think>", "<answer>", "</answer>"),
        *ACTIONS,
        "√",
        *(str(number) for number in range(10, 21)),
    ]


def build() -> Tokenizer:
    """Returns the tokenizer: 256 bytes, the special tokens, then the phrases."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    # transformers 5 gives every Qwen2 model this normalizer and Qwen2's splitting, whatever the file says. With the
    # first in the file and no merges that splitting could influence, all versions agree on the tokens.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in phrases()])
    return tokenizer


def save(directory: pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json in the form that transformers 4.57 and 5.x both read."""
    directory.mkdir(parents=True, exist_ok=True)
    build().save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 2048,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
