"""Plays games with a checkpoint: real environment, real prompts, tokens as the rollout server builds them."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rollwire.environment.frozen_lake import FrozenLake
from rollwire.rollout.prompts import PromptTemplates
from tools.tiny_policy.tokenizer import USUAL_RESPONSE_TOKENS

# Enough for any answer of four tokens; a longer response is invalid anyway, so it may as well be cut.
_RESPONSE_CAP = 8


@dataclass(frozen=True)
class Score:
    """What a policy did on a set of lakes.

    Attributes:
        success: Share of games won.
        valid: Share of turns with a legal action.
        turns: Mean turns per game.
    """

    success: float
    valid: float
    turns: float


@dataclass
class _Game:
    lake: FrozenLake
    tokens: list[int] = field(default_factory=list)
    turn: int = 0
    done: bool = False
    success: bool = False
    valid_turns: int = 0


class Evaluator:
    """Plays the same lakes with any settings of temperature."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Loads the checkpoint as every user of it does."""
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._prompts = PromptTemplates()

    @torch.inference_mode()
    def score(self, seeds: list[int], temperature: float, sampling_seed: int = 0) -> Score:
        """Plays one game per seed.

        Args:
            seeds: Seeds of the lakes.
            temperature: Sampling temperature over the whole vocabulary; 0 takes the likeliest token.
            sampling_seed: Seed of the policy's draws.
        """
        generator = torch.Generator().manual_seed(sampling_seed)
        games = [self._open(seed) for seed in seeds]
        while playing := [game for game in games if not game.done]:
            responses = self._respond([game.tokens for game in playing], temperature, generator)
            for game, response in zip(playing, responses, strict=True):
                self._advance(game, response)
        turns = sum(game.turn for game in games)
        return Score(
            success=float(np.mean([game.success for game in games])),
            valid=sum(game.valid_turns for game in games) / turns,
            turns=turns / len(games),
        )

    def _open(self, seed: int) -> _Game:
        game = _Game(FrozenLake())
        observation, info = game.lake.reset(seed)
        messages = self._prompts.first_messages(
            info["instructions"], observation, 0, game.lake.max_turns, USUAL_RESPONSE_TOKENS
        )
        game.tokens = self._encode(messages, prefix="")
        return game

    def _advance(self, game: _Game, response: list[int]) -> None:
        observation, reward, terminated, truncated, info = game.lake.step(self._tokenizer.decode(response))
        game.turn += 1
        game.done = terminated or truncated
        game.success = reward > 0
        game.valid_turns += int(info["metrics"]["action_is_valid"])
        left = game.lake.max_turns - game.turn
        messages = self._prompts.next_messages(observation, game.turn, left, USUAL_RESPONSE_TOKENS)
        game.tokens += response + self._encode(messages, prefix="\n")

    def _encode(self, messages: list[dict[str, str]], prefix: str) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer(prefix + text, add_special_tokens=False)["input_ids"]
        return ids

    def _respond(self, prompts: list[list[int]], temperature: float, generator: torch.Generator) -> list[list[int]]:
        """Samples one response per prompt, each up to and including its end token."""
        tokens, mask = _pad_left(prompts, self._tokenizer.pad_token_id)
        cache = DynamicCache(config=self._model.config)
        responses: list[list[int]] = [[] for _ in prompts]
        open_rows = torch.ones(len(prompts), dtype=torch.bool)
        for _ in range(_RESPONSE_CAP):
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
            output = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            chosen = _sample(output.logits[:, -1], temperature, generator)
            for row in torch.nonzero(open_rows).flatten().tolist():
                responses[row].append(int(chosen[row]))
            open_rows &= chosen != self._tokenizer.eos_token_id
            if not open_rows.any():
                break
            tokens = chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        return responses


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Returns int64[n], one token per row of float32[n, vocabulary]."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def _pad_left(prompts: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and mask, both int64[n, longest]."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return tokens, mask
